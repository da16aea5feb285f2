# What this cluster needs before `python -m cascade_train` works. Copy it to sbatch/env.sh, which git ignores, and keep
# the lines you need. train.sbatch sources it in the folder that the job was submitted from, on the first node; what it
# exports reaches every rank.

# The Python that has cascade_train: of a module, of a virtual environment, or both.
# module load cuda/13.0
. .venv/bin/activate

# Where models and datasets are downloaded to. Nodes without a network: download once, then forbid it.
# export HF_HOME=/shared/huggingface HF_HUB_OFFLINE=1

# Keys come from files that only you can read, never from this file or a command line, which all users of a node can see.
# WANDB_API_KEY=$(< "$HOME/.config/wandb.key"); export WANDB_API_KEY
# HF_TOKEN=$(< "$HOME/.config/huggingface.token"); export HF_TOKEN

# The network between nodes, where the ranks do not find each other by themselves: an interface, or all but some.
# export NCCL_SOCKET_IFNAME=^lo,docker0 GLOO_SOCKET_IFNAME=eth0
# Names of nodes that do not resolve: the address of the first node; a port of your own where jobs share nodes.
# export MASTER_ADDR=10.0.0.17 MASTER_PORT=29500

# AWS with EFA (p4d, p5 and newer). NCCL reaches EFA through the plugin aws-ofi-nccl, which AWS's images bring along:
# NCCL_DEBUG=INFO then says that it has selected the provider efa. Without the plugin NCCL falls back to TCP.
# export FI_PROVIDER=efa                 # libfabric: EFA, nothing else
# export FI_EFA_USE_DEVICE_RDMA=1        # GPUs talk to the network card directly; newer libfabric does it by itself
# export FI_EFA_USE_HUGE_PAGE=0          # data workers are forked, and huge pages run out with them
# export NCCL_SOCKET_IFNAME=^lo,docker0
# export NCCL_DEBUG=INFO
# export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib:${LD_LIBRARY_PATH:-}
