"""Commands of the predictions beside public measurements.

python -m benchmarks.measured_world COMMAND --help
"""

import click

from benchmarks.measured_world import (
    box,
    energy,
    energy_systems,
    engines,
    layouts,
    llama,
    llama_passes,
    llama_requests,
    media,
    models,
    muxserve,
    muxserve_packing,
    pace,
    passes,
    peaks,
    pilot_contest,
    sailor,
    serving,
    traffic,
)


@click.group(help=__doc__)
def main() -> None:
    pass


for _command in (
    serving.main,
    engines.mlenergy,
    engines.pilot,
    pilot_contest.main,
    passes.main,
    pace.main,
    llama_passes.main,
    llama_requests.main,
    peaks.main,
    models.main,
    llama.main,
    layouts.main,
    traffic.main,
    box.main,
    energy.main,
    energy_systems.main,
    sailor.main,
    muxserve.main,
    muxserve_packing.main,
    media.main,
):
    main.add_command(_command)

if __name__ == "__main__":
    main()
