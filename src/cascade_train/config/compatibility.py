"""Which tasks, objectives and models go together, by constants of their classes."""

from __future__ import annotations

from collections.abc import Sequence

from cascade_train.config.groups import chosen, option_files, option_targets
from cascade_train.config.schema import Root
from cascade_train.config.targets import class_constant, is_component
from cascade_train.errors import ConfigError


def check_task_fits_stage(root: Root) -> None:
    """Check that the task trains this kind of stage, by the constants `Task.fits` and `Stage.abilities`."""
    stage, roles = class_constant(root.model["_target_"], "name"), _roles(root.model["_target_"])
    fits = class_constant(root.task["_target_"], "fits")
    if stage is None or fits is None or roles & {*fits}:
        return
    tasks = [o for o, t in option_targets("task").items() if roles & {*(class_constant(t, "fits") or ())}]
    models = [o for o, t in option_targets("model").items() if _roles(t) & {*fits}]
    raise ConfigError(
        f"{chosen('task', root.task['_target_'])} trains {', '.join(fits)}, but "
        f"{chosen('model', root.model['_target_'])} is {stage}. Tasks that fit {stage}: "
        f"{', '.join(tasks) or 'none yet'}; models that fit this task: {', '.join(models) or 'none yet'}."
    )


def _roles(model: str) -> set[str]:
    """Return what a task may name a stage by: its name, and its abilities."""
    return {str(class_constant(model, "name")), *(class_constant(model, "abilities") or ())}


def check_objective_fits(root: Root) -> None:
    """Check that the objective scores what the task trains of this kind of stage.

    By the constants `Objective.denoises` and, of one that does not, `fits`; `Task.fits` and `reconstructs`;
    `Stage.abilities`. A task that does not train the stage at all is left to `check_task_fits_stage`.
    """
    if not all(is_component(node) for node in (root.model, root.task, root.objective)):
        return
    scoring = root.objective["_target_"]
    stage, denoises = class_constant(root.model["_target_"], "name"), class_constant(scoring, "denoises")
    trainable, reconstructs = (class_constant(root.task["_target_"], key) for key in ("fits", "reconstructs"))
    roles = _roles(root.model["_target_"])
    if None in (stage, denoises, trainable, reconstructs) or not roles & {*trainable}:
        return
    if not denoises and class_constant(scoring, "fits") is None:
        return  # what it does not define is named by preflight's check of components
    if not _scores(scoring, roles, reconstructs):
        objectives = [o for o, t in _objectives(root).items() if _scores(t, roles, reconstructs)]
        others = {o: _roles(t) for o, t in option_targets("model").items()}
        models = [o for o, r in others.items() if r & {*trainable} and _scores(scoring, r, reconstructs)]
        task, objective = (chosen(key, getattr(root, key)["_target_"]) for key in ("task", "objective"))
        model, instead = chosen("model", root.model["_target_"]), f" but {_list(models)}" if models else ""
        raise ConfigError(
            f"{task} with {objective} does not train {model} ({stage}){instead}. For {model}, choose "
            f"objective={_list(objectives) or '(none yet)'}."
        )


def _scores(objective: str, roles: set[str], reconstructs: Sequence[str]) -> bool:
    """Return whether an objective scores what a task with these `reconstructs` trains of a stage with these roles."""
    fits = class_constant(objective, "fits")
    if class_constant(objective, "denoises"):
        return not roles & {*reconstructs} and (fits is None or bool(roles & {*fits}))
    return bool(reconstructs) and bool(roles & {*(fits or ())})


def check_noise_unit(root: Root) -> None:
    """Check that the network sees noise levels as it was made for, by `Stage.noise_unit` and `NoiseCondition.unit`."""
    nodes = (root.model, root.task, root.objective, root.objective.get("noise_condition"))
    if not all(is_component(node) for node in nodes):
        return
    model, task, _, condition = (node["_target_"] for node in nodes)
    wanted, given = class_constant(model, "noise_unit"), class_constant(condition, "unit")
    if wanted is None or given in (None, wanted):
        return
    reconstructs = class_constant(task, "reconstructs") or ()
    fitting = [o for o, t in _objectives(root).items() if _scores(t, _roles(model), reconstructs)]
    raise ConfigError(
        f"objective.noise_condition={condition.rpartition('.')[2]} gives the network a {given} for noise level, and "
        f"that of {chosen('model', model)} was made for a {wanted}. Choose objective={_list(fitting)}."
    )


def _objectives(root: Root) -> dict[str, str]:
    """Return the packaged objectives and their classes, except those with another unit of noise levels."""
    wanted = class_constant(root.model["_target_"], "noise_unit")
    conditions = {o: file.get("noise_condition") for o, file in option_files("objective").items()}
    units = {o: class_constant(node["_target_"], "unit") if node else None for o, node in conditions.items()}
    return {o: t for o, t in option_targets("objective").items() if wanted is None or units[o] in (None, wanted)}


def _list(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
