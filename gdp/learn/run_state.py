"""The state of a training run on disk: Orbax's checkpoints, of which the newest stays.

Each is written beside the last one and takes its place by one rename, so that a run which is killed
resumes from the one or from the other. All processes read it; the first one writes.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gdp.base.checkpoint import CheckpointError, strict_json


class RunStateStore:
    """The checkpoints of one run, by the number of its updates.

    Args:
        folder: Where they lie; made by the first `save`.
        rank: Number of this process among those that train together.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder, self._rank = folder, rank

    def save(self, step: int, tree: Any, meta: dict[str, Any]) -> None:
        """Write the arrays of a pytree and a JSON document; nothing but in the first process.

        Raises:
            OSError: if they cannot be written. The last checkpoint is kept.
        """
        if self._rank > 0:
            return
        with self._manager() as manager:
            # A run that is resumed after its last update has nothing new to say.
            if step != manager.latest_step():
                arguments = ocp.args.Composite(
                    tree=ocp.args.StandardSave(jax.tree.map(np.asarray, tree)),
                    meta=ocp.args.JsonSave(json.loads(strict_json(meta))),
                )
                manager.save(step, args=arguments, force=True)

    def meta(self) -> dict[str, Any] | None:
        """The newest JSON document; None where the run has saved nothing."""
        if (self._folder / "meta.json").exists():
            raise CheckpointError(
                f"{str(self._folder)!r} is the state of a run of an older gdp, which this one does "
                "not read; begin anew in another folder, with `start` of the recipe at its best/"
            )
        return self._restored("meta", ocp.args.JsonRestore())

    def tree(self, like: Any) -> Any:
        """The newest arrays, with the structure of `like`.

        Raises:
            CheckpointError: if they are damaged or of another network.
        """
        return self._restored("tree", ocp.args.StandardRestore(jax.tree.map(np.asarray, like)))

    def _restored(self, name: str, argument: Any) -> Any:
        if not self._folder.exists():
            return None
        with self._manager() as manager:
            if (step := manager.latest_step()) is None:
                return None
            try:
                return manager.restore(step, args=ocp.args.Composite(**{name: argument}))[name]
            except (ValueError, OSError, KeyError) as error:
                found = str(error).strip().splitlines() or [type(error).__name__]
                raise CheckpointError(
                    f"checkpoint {str(self._folder / str(step))!r} is damaged or of another "
                    f"network ({found[0]}); remove it to begin anew"
                ) from None

    def _manager(self) -> ocp.CheckpointManager:
        # This process alone: the others must not wait for one that writes.
        alone = ocp.options.MultiprocessingOptions(
            primary_host=self._rank,
            active_processes={self._rank},
            barrier_sync_key_prefix=f"run_state_{self._rank}",
        )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1,
            create=False,
            enable_async_checkpointing=False,
            multiprocessing_options=alone,
        )
        if self._rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
        return ocp.CheckpointManager(self._folder.absolute(), options=options)
