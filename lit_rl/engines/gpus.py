"""Which GPUs of a machine a server gets; pure functions of what is there and what the trainer uses."""

from __future__ import annotations

from lit_rl.errors import SettingsError

KEY = "data.engine.devices"
ELSEWHERE = (
    "or start a server on another machine with `lit-rl serve`, and give this run its address: data.engine.url, with "
    "data.engine.launch: false"
)


def visible_gpus(count: int, setting: str | None) -> tuple[str, ...]:
    """Names of the GPUs that this process sees, as a child's ``CUDA_VISIBLE_DEVICES`` takes them.

    Args:
        count: How many it sees.
        setting: Its own ``CUDA_VISIBLE_DEVICES``, whose names may be numbers or ids of the machine.

    Example: of two seen under ``"4,6"`` the second is ``"6"``; without a setting it is ``"1"``.
    """
    names = [name.strip() for name in setting.split(",")] if setting is not None else []
    return tuple(names[:count]) if len(names) >= count else tuple(str(place) for place in range(count))


def server_gpus(
    asked: tuple[int, ...] | None, *, trainer: tuple[int, ...], visible: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Names of the GPUs that a server gets; none where that is left to vLLM, which takes the first that it sees.

    Args:
        asked: ``data.engine.devices``: places in ``visible``; None takes the first one that the trainer leaves.
        trainer: Places of the trainer's GPUs.
        visible: Names of the GPUs here; None where the server may be meant for another machine.

    Raises:
        SettingsError: a GPU is not there, or the trainer's, or none is left.
    """
    if visible is None:
        return tuple(str(place) for place in asked or ())
    free = [place for place in range(len(visible)) if place not in trainer]
    if asked is None:
        if free:
            return (visible[free[0]],)
        used = (
            f"the trainer uses {list(trainer)} of the {len(visible)} GPUs visible here, so none is left for the server"
        )
        raise SettingsError(
            KEY, None, f"{used}; add a second GPU, give the trainer fewer (trainer.devices), {ELSEWHERE}"
        )
    given = list(asked)
    for place in asked:
        if place >= len(visible):
            raise SettingsError(KEY, given, f"there is no GPU {place}; {len(visible)} are visible here, counted from 0")
        if place in trainer:
            leave = f"choose from {free}" if free else f"add a second GPU, {ELSEWHERE}"
            raise SettingsError(KEY, given, f"the trainer uses GPU {place} too; {leave}")
    return tuple(visible[place] for place in asked)
