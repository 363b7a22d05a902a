"""Compilation of many variants at once, in worker processes.

Lives here: the spread of jobs over spawned processes and what is said about it. One compilation is
`compiler`'s work. Invariant: results come in the order of the jobs, all jobs are tried, and every
failure is named.
"""

import multiprocessing
import os
import pickle
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from fovea import env
from fovea.compile import key as keys
from fovea.compile import progress
from fovea.compile.artifact import Artifact
from fovea.compile.cache import Cache, default_cache
from fovea.compile.compiler import CompileError, check_compiler, compile_variant
from fovea.compile.key import Variant
from fovea.compile.target import CompileTarget
from fovea.errors import invalid

Job = tuple[Variant, CompileTarget]

_WHY_WORKERS_DIE = (
    'is the script\'s work under `if __name__ == "__main__":`, since workers import it? or out of '
    "memory: use workers=1"
)


def compile_many(
    jobs: Sequence[Job], *, workers: int | None = None, cache: Cache | None = None
) -> list[Artifact]:
    """Return the artifacts of all jobs, compiled in parallel where the cache lacks them.

    Workers are spawned, so a script that calls this needs `if __name__ == "__main__":`, and
    variants must be picklable. They see no GPU.

    Args:
        jobs: variants with their targets; the same pair twice is compiled once.
        workers: number of processes; default one per processor that this process may use.
        cache: where artifacts are kept; default the user's cache.

    Raises:
        UnsupportedError: the compiler is not installed here.
        CompileError: jobs failed; the text names each one and why.
    """
    if workers is not None and workers < 1:
        raise ValueError(invalid("workers", workers, "1 or more", "omit it to use all processors"))
    cache = cache or default_cache()
    by_key = {keys.cache_key(*job): job for job in jobs}
    found = {key: cache.load(key) for key in by_key}
    missing = [(key, by_key[key]) for key, artifact in found.items() if artifact is None]
    if missing:
        check_compiler(missing[0][1][0].name)
        _check_picklable([job for _, job in missing])
        count = min(len(missing), workers or len(os.sched_getaffinity(0)))
        found.update(_compile_missing(missing, count, cache))
    artifacts = [found[keys.cache_key(*job)] for job in jobs]
    return [a for a in artifacts if a is not None]


def _compile_missing(
    missing: list[tuple[str, Job]], workers: int, cache: Cache
) -> dict[str, Artifact]:
    done: dict[str, Artifact] = {}
    failures: list[str] = []
    context = multiprocessing.get_context("spawn")
    with (
        progress.Counter(len(missing)) as counter,
        ProcessPoolExecutor(workers, mp_context=context, initializer=env.hide_gpus) as executor,
    ):
        futures: dict[Future[tuple[Artifact, float]], tuple[str, Job]] = {
            executor.submit(_work, job): (key, job) for key, job in missing
        }
        for future in as_completed(futures):
            key, (variant, target) = futures[future]
            label = f"{variant.name} for {target}"
            try:
                artifact, seconds = future.result()
                done[key] = cache.store(artifact)
                counter.advance(label, seconds)
            except BrokenProcessPool as error:
                failures.append(f"{label}: a worker died ({error}); {_WHY_WORKERS_DIE}")
                counter.advance(label, 0.0, failed=True)
            except Exception as error:
                failures.append(f"{label}: {type(error).__name__}: {error}")
                counter.advance(label, 0.0, failed=True)
    if failures:
        raise CompileError(
            f"{len(failures)} of {len(missing)} variants do not compile:\n  "
            + "\n  ".join(failures)
        )
    return done


def _work(job: Job) -> tuple[Artifact, float]:
    start = time.perf_counter()
    artifact = compile_variant(*job)
    return artifact, time.perf_counter() - start


def _check_picklable(jobs: list[Job]) -> None:
    for variant, _ in jobs:
        try:
            pickle.dumps(variant)
        except Exception as error:
            raise TypeError(
                invalid(
                    "variant",
                    f"{variant.name!r} ({type(variant).__qualname__})",
                    "a picklable object",
                    f"define its class at a module's top level ({error})",
                )
            ) from error
