"""Jobs from Python, as users write it."""

from typing_extensions import assert_type

from paceline import jobs
from paceline.jobs import Job, JobSpec, LogQuery, UserError


def accuracy(rate: float) -> float:
    """Return what a job is to find."""
    return rate


def last_lines(job: Job) -> dict[int, bytes]:
    """Return what the ranks of a job have printed last."""
    return {lines.rank: lines.text for lines in jobs.logs(job, LogQuery(ranks=None, tail=1))}


def main() -> None:
    """Submit a script, a specification and a function, and look at them."""
    try:
        job = assert_type(jobs.submit("train.py", ["--epochs", "3"], nproc=2, on="lab"), Job)
    except UserError as error:
        raise SystemExit(f"not submitted: {error}") from error
    jobs.submit(JobSpec(script="train.py", ranks=2, nodes="1:2", env={"LR": "0.1"}, time_limit=7200.0, memory=16 << 30))
    best: float = jobs.submit(accuracy, kwargs={"rate": 0.1}, hosts=["node1:2", "node2:2"]).result("10m")
    for other in jobs.list_jobs():
        assert_type(other.state, str)
    assert_type(jobs.wait(job.name, seconds=3.0).exit_code, int | None)
    usage = jobs.top(job)
    print(best, usage, [node.name for node in jobs.nodes()], last_lines(job))
    jobs.stop(job)
    jobs.delete(job)


if __name__ == "__main__":
    main()
