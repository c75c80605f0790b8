"""`windlass why job/NUMBER` on jobs that sbatch submitted to the real Slurm: five ends, each with its evidence line."""

from __future__ import annotations

import json
import subprocess

import pytest

from windlass.diagnose import Facts, diagnose

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

MUCH_MEMORY = "python3 -c 'import time; much = bytearray(400 * 2**20); time.sleep(120)'"


class Queue:
    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder

    def submit(self, script, *options):
        command = ["sbatch", "--parsable", f"--output={self.folder}/%j.out", *options]
        return subprocess.run(
            command, input=f"#!/bin/sh\n{script}\n", capture_output=True, text=True, env=self.cluster.environment()
        )

    def job(self, script, *options):
        answer = self.submit(script, *options)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.strip()

    def wait_for(self, number, *words, seconds=120):
        def holds():
            told = self.cluster.ask("squeue", "-h", "-t", "all", "-j", number, "-o", "%T %r")
            return any(word in told for word in words)

        self.cluster.wait(holds, f"job {number} is {words}", seconds)

    def update(self, *what):
        self.cluster.ask("scontrol", "update", *what)


@pytest.fixture
def queue(cluster, bench):
    return Queue(cluster, bench.folder)


def test_why_jobs_of_others_ended_or_wait(cluster, bench, queue):
    limited = queue.job("echo step 1 loss 2.0; exec sleep 300", "--time=1", "--nodelist=node1")
    big = queue.job(f"exec {MUCH_MEMORY}", "--mem=100", "--nodelist=node2")
    lost = queue.job("exec sleep 300", "--no-requeue", "--nodelist=node4")
    held = queue.job("true", "--hold")
    never = queue.job("true", "--hold", "--nodelist=node3", "--constraint=small")
    refused = queue.submit("true", "--constraint=large")
    try:
        queue.wait_for(limited, "RUNNING")
        queue.update(f"jobid={limited}", "endtime=now+1")  # the limit itself counts in minutes
        queue.wait_for(lost, "RUNNING")
        cluster.lose_node("node4")
        queue.update("nodename=node3", "activefeatures=odd", "availablefeatures=odd")
        cluster.ask("scontrol", "release", never)
        queue.wait_for(never, "BadConstraints")
        queue.wait_for(big, "FAILED")
        queue.wait_for(lost, "NODE_FAIL")
        queue.wait_for(limited, "TIMEOUT")
        expected = {
            limited: ("time_limit", "TIMEOUT"),
            big: ("host_oom", "emory limit"),
            lost: ("node_lost", "NODE_FAIL"),
            held: ("job_held", "JobHeldUser"),
            never: ("queue_never", "BadConstraints"),
        }
        for number, (name, words) in expected.items():
            answer = bench.windlass("why", f"job/{number}", "--json")
            assert answer.returncode == 0, answer.stderr
            verdict = json.loads(answer.stdout)
            assert verdict["class"] == name, verdict
            assert words in verdict["evidence"][0]["line"]
            assert verdict["confidence"] >= 0.8
    finally:
        queue.update("nodename=node3", "activefeatures=small", "availablefeatures=small")
        subprocess.run(["scancel", held, never], env=cluster.environment(), check=False)
        if "node4" not in cluster.daemons:
            cluster.start_slurmd("node4")
            cluster.revive("node4")
    verdict = diagnose(Facts.read({"logs": {"submit": refused.stderr}}))
    assert verdict.name == "queue_never"
    assert "Invalid feature specification" in verdict.evidence[0].line
    missing = bench.windlass("why", "job/999999")
    assert missing.returncode != 0
    assert "Slurm knows no job 999999" in missing.stderr
