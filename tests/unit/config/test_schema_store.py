"""What one composition changes no other sees."""

from omegaconf import DictConfig, OmegaConf

from cascade_train.config.launch import compose_and_run

TINY = ("model=c_tiny", "task=lora")


def test_what_one_composition_changes_no_other_sees() -> None:
    seen: list[dict] = []

    def change(cfg: DictConfig) -> int:
        seen.append(OmegaConf.to_container(cfg))
        OmegaConf.set_readonly(cfg, False)
        OmegaConf.set_struct(cfg, False)
        cfg.train.max_steps = 7
        cfg.run.allowed_packages.append("other")
        cfg.more = 1
        return 0

    assert [compose_and_run(TINY, change) for _ in range(2)] == [0, 0]
    assert seen[0] == seen[1]
    assert seen[0]["train"]["max_steps"] == 10000
