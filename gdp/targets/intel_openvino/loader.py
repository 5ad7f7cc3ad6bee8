"""Compiles a model with the devices that gdp chose, and proves that each op is where it was placed.

    python load.py MODEL.onnx [PRECISION]

or, in a program, `load(MODEL)`, which returns the compiled model. OpenVINO's names of the devices
are in `devices.json`, such as {"cpu": "CPU", "gpu0": "GPU.0"}; edit them where they are others.
Kernels compute in PRECISION, float32 unless "bf16" or "f16" is given: OpenVINO itself would take
what is fastest on a device, so that outputs would differ in the third digit.
"""

import json
import pathlib
import sys

# Before the import: OpenVINO's tools would report to their makers from a process of their own.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino

HERE = pathlib.Path(__file__).parent


def load(path, precision="f32", core=None, config=None):
    """The model, compiled for HETERO; `config` is passed on to OpenVINO, instead of the precision.

    Raises RuntimeError where OpenVINO cut the model into other pieces than were placed.
    """
    plan = json.loads((HERE / "affinity.json").read_text(encoding="utf-8"))
    names = json.loads((HERE / "devices.json").read_text(encoding="utf-8"))
    core = core or openvino.Core()
    model = core.read_model(path)
    place(model, plan, names)
    used = list(dict.fromkeys(names[device] for device in plan["order"]))
    config = {"INFERENCE_PRECISION_HINT": precision} if config is None else config
    if len(used) == 1:
        return core.compile_model(model, used[0], config)
    compiled = core.compile_model(model, "HETERO:" + ",".join(used), config)
    prove(compiled, plan, names)
    return compiled


def place(model, plan, names):
    """Give every op its device. Ops that the model does not name are parts of one that it does, or
    serve one: they go where what reads them goes, the earliest stage first, else after what they
    read. So no tensor ever goes back to an earlier stage."""
    stage_of = {device: stage for stage, device in enumerate(plan["order"])}
    ops = model.get_ordered_ops()
    stage = {}
    for op in ops:
        device = plan["ops"].get(op.get_friendly_name())
        for output in op.outputs():
            for tensor in output.get_names():
                device = device or plan["tensors"].get(tensor)
        if device is not None and op.get_type_name() not in ("Parameter", "Result"):
            stage[op.get_friendly_name()] = stage_of[device]
    for op in reversed(ops):
        readers = [r.get_node().get_friendly_name() for o in op.outputs() for r in target(o)]
        stages = [stage[name] for name in readers if name in stage]
        if op.get_friendly_name() not in stage and stages:
            stage[op.get_friendly_name()] = min(stages)
    for op in ops:
        if op.get_friendly_name() not in stage:
            makers = [i.get_source_output().get_node().get_friendly_name() for i in op.inputs()]
            stage[op.get_friendly_name()] = max((stage.get(name, 0) for name in makers), default=0)
        op.get_rt_info()["affinity"] = names[plan["order"][stage[op.get_friendly_name()]]]


def target(output):
    """Readers of an output, without results of the model, which follow their producers."""
    return [i for i in output.get_target_inputs() if i.get_node().get_type_name() != "Result"]


def prove(compiled, plan, names):
    """Raise RuntimeError unless there are as many pieces as stages on different devices: with a
    device for every op, HETERO makes more of them only where an op is not with its neighbours."""
    wanted = sum(
        k == 0 or names[device] != names[plan["order"][k - 1]]
        for k, device in enumerate(plan["order"])
    )
    pieces = int(compiled.get_property("HETERO_NUMBER_OF_SUBMODELS"))
    devices = set(compiled.get_property("EXECUTION_DEVICES"))
    if pieces != wanted or devices != {names[device] for device in plan["order"]}:
        raise RuntimeError(
            f"OpenVINO cut the model into {pieces} pieces on {', '.join(sorted(devices))}, the "
            f"placement has {wanted}; some op is not where it was placed"
        )


def main():
    """Compile, and print where each op runs."""
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    compiled = load(*sys.argv[1:])
    print(compiled.get_property("EXECUTION_DEVICES"))


if __name__ == "__main__":
    main()
