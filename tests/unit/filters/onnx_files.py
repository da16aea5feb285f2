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


def detector(path: Path, side: int = 320) -> str:
    """Write a face detector that finds a face of 64 px wherever a place of a grid is red and not green.

    Outputs are those of an SCRFD network, for three grids each: scores, distances to the sides and offsets of
    landmarks. Only the coarsest grid ever finds anything.
    """
    nodes, constants, outputs = [], {}, []
    for kind, width in (("score", 1), ("distance", 4), ("offset", 10)):
        constants[f"{kind}_shape"] = np.array([-1, width], dtype=np.int64)
        for stride in (8, 16, 32):
            name = f"{kind}_{stride}"
            colours = np.zeros((2 * width, 3, 1, 1), dtype=np.float32)
            offsets = np.tile(np.array([-0.5, -0.5, 0.5, -0.5, 0, 0, -0.5, 0.5, 0.5, 0.5], dtype=np.float32), 2)
            bias = {"score": np.zeros(2), "distance": np.ones(8), "offset": offsets}[kind].astype(np.float32)
            if kind == "score" and stride == 32:
                colours[0, 0], colours[0, 1] = 0.5, -0.5
            constants |= {f"{name}_colours": colours, f"{name}_bias": bias}
            nodes += [
                helper.make_node(
                    "AveragePool", ["image"], [f"{name}_a"], kernel_shape=[stride] * 2, strides=[stride] * 2
                ),
                helper.make_node("Conv", [f"{name}_a", f"{name}_colours", f"{name}_bias"], [f"{name}_b"]),
                helper.make_node("Transpose", [f"{name}_b"], [f"{name}_c"], perm=[0, 2, 3, 1]),
                helper.make_node("Reshape", [f"{name}_c", f"{kind}_shape"], [name]),
            ]
            outputs.append(name)
    return save(path, nodes, [picture(1, 3, side, side)], outputs, constants)


def recogniser(path: Path, width: int = 512) -> str:
    """Write a recogniser whose vector is a fixed mixture of the mean colours of the aligned face."""
    mixture = np.random.default_rng(0).standard_normal((width, 3, 1, 1)).astype(np.float32)
    nodes = [
        helper.make_node("GlobalAveragePool", ["image"], ["mean"]),
        helper.make_node("Conv", ["mean", "mixture"], ["mixed"]),
        helper.make_node("Flatten", ["mixed"], ["who"]),
    ]
    return save(path, nodes, [picture(1, 3, 112, 112)], ["who"], {"mixture": mixture})
