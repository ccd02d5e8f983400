"""Every fixed deadline of the system, in seconds, and how the waits nest.

An inner wait must end before the wait around it does, so that the error names the part that is to
blame. Each row waits for the row below it. Keys are set in the configuration; names stand here.

    who waits            for what                        at most
    -------------------  ------------------------------  -----------------------------------------
    launcher             a sign of life of a rank        cluster.heartbeat_timeout_s
    every rank           a collective, rank 0's work     cluster.collective_timeout_s
    rank 0               recordings, on the disk         half of cluster.collective_timeout_s
    rank 0's peers       the rollouts of a step          rollout.timeout_s + STEP_GRACE_S
    rank 0               the rollout service's thread    rollout.timeout_s + LOOP_GRACE_S
    rollout service      an engine that comes back       rollout.engine.start_timeout_s, pauses
    weight publication   one bucket at an engine         update_timeout_s + ENGINE_GRACE_S
    dispatcher           one request, pauses aside       rollout.engine.request_timeout_s
    fleet                a token of a busy engine        rollout.engine.progress_timeout_s
    engine client        a control call                  its limit + ENGINE_GRACE_S; twice for one
                                                         that may wait for the call before it
    fleet                an engine's health              rollout.engine.health_timeout_s
    group runner         one try of a rollout            rollout.workflow.timeout_s
    an environment       one call of a method            rollout.workflow.tool_timeout_s
    reward pool          one reward                      reward.timeout_s
    any task             a cancelled task's clean-up     CANCEL_S

Intervals between two looks (`POLL_S`) are no deadlines; they stand where the loop is.
"""

from __future__ import annotations

# --- one process: tasks and threads of asyncio ----------------------------------------------------

CANCEL_S = 5.0  # a cancelled task's clean-up
LOOP_GRACE_S = 15.0  # beyond the inner deadline, before the event loop itself counts as blocked
GIVE_UP_S = 30.0  # the clean-up of work that the trainer has given up, engine calls included

IDLE_THREAD_S = 10.0  # a thread for calls that are not async, without one, before it ends
END_COMMAND_S = 2.0  # from SIGTERM to SIGKILL of an agent's command; its guard needs 1.5
RETRY_S = 1.0  # the pause before a rollout that failed is tried again; it doubles
MAX_RETRY_S = 60.0  # the longest one

# --- engines --------------------------------------------------------------------------------------

ENGINE_GRACE_S = 5.0  # beyond the engine's own deadline: a slow answer is better than none
TERMINATE_S = 5.0  # from SIGTERM to SIGKILL of a server process
REAP_S = 10.0  # from SIGKILL until the kernel has taken the process away
BROKEN_CONNECTION_S = 0.5  # from a broken connection to the end of the process that held it
REQUEST_S = 600.0  # one request that makes no token, as it queues; each token adds TOKEN_S
TOKEN_S = 1.0  # one token of the longest response, on an engine as full as it can be
ABORT_S = 10.0  # a request that was aborted to be answered with the tokens that it has
LAST_TOKEN_S = 30.0  # the token that is being made when an embedded engine closes
KILL_ENGINE_S = 30.0  # more than TERMINATE_S and REAP_S: how long the fleet waits for an end
CLOSE_ENGINES_S = 30.0  # a transport or a service to close
REWARD_START_S = 120.0  # imports of the user's reward modules in a worker
AUDIT_S = 10.0  # the audit of a reward while the engines start; usual rewards take half a second
STRAYS_S = 2.0  # processes that a reward or a sandboxed program left, to be killed
MCP_CLOSE_S = 10.0  # an MCP server to end: its package asks, then kills, within 7 s
SANDBOX_START_S = 30.0  # namespaces, mounts and an interpreter, before a program's own time
FUSION_GRACE_S = 15.0  # beyond the limits that a SandboxFusion server keeps itself: its queue
FIRST_REQUEST_S = 10.0  # a new connection to one of our HTTP servers, before it is closed
SILENT_BODY_S = 60.0  # a client in the middle of a request, before it is refused
GATEWAY_STARTS_S = 30.0  # the endpoint of agent programs to listen
GATEWAY_CLOSES_S = 1.0  # its open requests to be answered, at the end of a run
WORKER_ENDS_S = 1.0  # a worker that closed its socket to be gone, so that its exit code is known

# --- weight publication ---------------------------------------------------------------------------

TRANSPORT_GRACE_S = 10.0  # more than ENGINE_GRACE_S: an engine keeps its own deadlines first
GROUP_JOIN_S = 60.0  # both sides of a process group to meet
ENGINE_ENDING_S = 45.0  # beyond update_timeout_s, to give up and end an engine that hangs

# --- the trainer's ranks --------------------------------------------------------------------------

STEP_GRACE_S = 60.0  # more than LOOP_GRACE_S: rank 0 knows which engine it waits for
BLAME_S = 3.0  # a peer's failure to become known, once a collective broke
CHECKPOINT_TENSOR_S = 30.0  # the tensor at hand, where a run ends in the middle of a checkpoint
UPLOAD_S = 300.0  # wandb at the end of a run; what is not uploaded then stays on the disk

# --- launchers ------------------------------------------------------------------------------------

INTERPRETER_S = 120.0  # an interpreter to import torch, from a cold disk, and tell its versions
NVIDIA_SMI_S = 30.0  # nvidia-smi to answer, which a driver in trouble does not
STORE_S = 60.0  # reaching a key-value store that is known to be there
NOTICE_S = 5.0  # from a run's failure to the end of a rank that has not noticed it
LEAVE_S = 45.0  # more than CLOSE_ENGINES_S: ... of a rank that has, but is still closing things
SAME_SIGNAL_S = 1.0  # a signal that reached a rank to come from its launcher, too
SIGNALLED_S = 5.0  # silence of peers that counts once this process was asked to end
STALL_S = 10.0  # between two looks at the peers: the watcher itself stood still
END_RANK_S = 10.0  # from SIGTERM to SIGKILL of a rank that we end
STACKS_S = 1.0  # a stuck process to write its stacks
EXIT_S = 15.0  # a process to end once its command has, whatever a plugin left behind
SPEAKER_S = 10.0  # the rank that tells the user to do so before another one leaves

# --- the run's folder -----------------------------------------------------------------------------

OWNER_BEAT_S = 10.0  # from one sign of life in an owner file to the next, where there are no locks
OWNER_LOST_S = 45.0  # more than four beats: without one the owner of a folder counts as gone

# --- the rollout service, a child of rank 0 -------------------------------------------------------

SERVICE_GRACE_S = 60.0  # the service keeps its own limits; rank 0's come later
SERVICE_ANSWER_S = 60.0  # an answer of the service that needs no work
CLOSE_SERVICE_S = 20.0  # the service to close, at the end of a run

# --- Ray ------------------------------------------------------------------------------------------

END_SERVER_S = 15.0  # TERMINATE_S and REAP_S: an engine's actor to end its server
ACTOR_END_S = 10.0  # the names of ended actors to be free again
ACTOR_LOST_S = 30.0  # Ray to say that a killed actor is gone
PROCESS_LOST_S = 3.0  # Ray to say that a process is gone, which its peers feel at once
RAY_REACH_S = 10.0  # a connection to the port of a Ray cluster
STATUS_ANSWER_S = 15.0  # a run's status actor to answer another shell
