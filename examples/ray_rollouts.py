"""Rollouts on a Ray cluster, each in a checkout on its actor's node.

ray_rollouts.py INSTANCE COMMAND TEST [HOW_MANY]; RAY_ADDRESS names the cluster.
"""

import json
import sys

import ray

from mirrord.integrations.ray import CHECKOUTS, RolloutActor


def main(instance: str, command: str, test: str, how_many: int) -> None:
    ray.init(log_to_driver=False)
    # room for a checkout, and for a grade beside it
    actor_class = RolloutActor.options(resources={CHECKOUTS: 2})
    actors = [actor_class.remote() for _ in range(how_many)]
    leases = ray.get([actor.checkout.remote(instance) for actor in actors])
    found = []
    for actor, lease in zip(actors, leases, strict=True):
        # an actor executes its calls in order, so there is no need to wait here
        ran = actor.run.remote(lease.id, command, timeout=120)
        found += [(ran, actor.diff.remote(lease.id), actor.grade.remote(lease.id, test))]
    for lease, answers in zip(leases, found, strict=True):
        ran, patch, graded = ray.get(list(answers))
        facts = {"tree": lease.path, "status": ran.exit_code, "patch": patch.decode()}
        print(json.dumps({**facts, "passed": graded.exit_code == 0}))
    ray.get([actor.release.remote(lease.id) for actor, lease in zip(actors, leases, strict=True)])


instance, command, test, *rest = sys.argv[1:]
main(instance, command, test, int([*rest, "4"][0]))
