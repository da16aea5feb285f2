"""Small networks stored as ONNX, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

IR_VERSION, OPSET = 9, 17


def save(path: Path, nodes: list, inputs: list, outputs: list[str], constants: dict[str, np.ndarray]) -> str:
    """Write a graph of fp32 tensors of any shape, and return its path."""
    graph = helper.make_graph(
        nodes,
        "test",
        inputs,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.save(model, str(path))
    return str(path)


def picture(*shape: int | str) -> onnx.ValueInfoProto:
    """Return an input `image` of this shape; names are free sizes."""
    return helper.make_tensor_value_info("image", TensorProto.FLOAT, list(shape))


def two_maps(path: Path, size: int | str = "side") -> str:
    """Write a network with the outputs `grey`, (1, 1, h, w), and `colours`, (1, 3, h, w), both at half size."""
    mean = np.full((1, 3, 1, 1), 1 / 3, dtype=np.float32)
    nodes = [
        helper.make_node("AveragePool", ["image"], ["colours"], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
        helper.make_node("Conv", ["colours", "mean"], ["grey"]),
    ]
    height, width = (size, size) if isinstance(size, int) else ("h", "w")
    return save(path, nodes, [picture(1, 3, height, width)], ["grey", "colours"], {"mean": mean})
