#!/usr/bin/env bash
# Submit a job of this folder whose tasks run in the image of scripts/docker/Dockerfile, with pyxis. From the checkout, whose code runs;
# the environments are the image's:
#
#   enroot import -o /shared/rlcore.sqsh docker://REGISTRY#rlcore:TAG        # once
#   IMAGE=/shared/rlcore.sqsh MOUNTS=/shared:/shared ./scripts/slurm/pyxis.sh [OPTIONS OF sbatch] scripts/slurm/ray.sbatch CONFIG.yaml ...
#
# MOUNTS: what the tasks see besides the checkout, as pyxis takes it. SRUN_ARGS, PRELUDE, SERVERS and the others are those of the job's file.
set -euo pipefail
: "${IMAGE:?an image of enroot, as /shared/rlcore.sqsh}"
environments=/opt/rlcore
export SRUN_ARGS="--container-image=$IMAGE --container-mounts=$PWD:$PWD${MOUNTS:+,$MOUNTS} ${SRUN_ARGS:-}"
export PYTHON=$environments/.venv/bin/python
# Ranks, workers of rewards and actors of Ray import from the checkout too, not what the image has beside its environments.
# shellcheck disable=SC2016     # for the tasks
export PRELUDE='export PYTHONPATH=$CHECKOUT; '${PRELUDE:-:}
exec sbatch "$@" "rollout.engine.python=$environments/.venv-sglang/bin/python"
