"""Every fixed deadline of the system, in seconds, and how the waits nest.

An inner wait must end before the wait around it does, so that the error names the part at fault.
Each row waits for the row below it. Keys are set in the configuration; constants are in this file.

    who waits            for what                        at most
    -------------------  ------------------------------  -----------------------------------------
    launcher             a sign of life of a rank        cluster.heartbeat_timeout_s
    every rank           a collective, rank 0's work     cluster.collective_timeout_s
    rank 0               recordings, on the disk         half of cluster.collective_timeout_s
    rank 0's peers       the rollouts of a step          rollout.timeout_s + STEP_GRACE_S
    rank 0               the rollout service's thread    rollout.timeout_s + LOOP_GRACE_S
    rollout service      an engine's restart             rollout.engine.start_timeout_s, pauses
    weight publication   one bucket at an engine         update_timeout_s + ENGINE_GRACE_S
    dispatcher           one request, pauses aside       rollout.engine.request_timeout_s
    fleet                a token of a busy engine        rollout.engine.progress_timeout_s
    engine client        a control call                  update_timeout_s + ENGINE_GRACE_S if the
                                                         engine has that limit, too; CALLS_AT_ONCE
                                                         times for one that may wait for others
    fleet                an engine's health              health_timeout_s + ENGINE_GRACE_S
    group runner         one try of a rollout            rollout.workflow.timeout_s
    an environment       one call of a method            rollout.workflow.tool_timeout_s
    reward pool          one reward                      reward.timeout_s
    any task             a cancelled task's clean-up     CANCEL_S

Polling intervals (`POLL_S`) are not deadlines; each is defined next to its loop.
"""

from __future__ import annotations

# --- one process: tasks and threads of asyncio ----------------------------------------------------

CANCEL_S = 5.0  # clean-up of a cancelled task
LOOP_GRACE_S = 15.0  # beyond the inner deadline, before the event loop itself counts as blocked
GIVE_UP_S = 30.0  # clean-up of work that the trainer has given up, engine calls included

IDLE_THREAD_S = 10.0  # idle time after which a thread for blocking calls ends
END_COMMAND_S = 2.0  # from SIGTERM to SIGKILL of an agent's command; its guard needs 1.5
RETRY_S = 1.0  # first pause before a failed rollout is retried; it doubles
MAX_RETRY_S = 60.0  # longest such pause

# --- engines --------------------------------------------------------------------------------------

ENGINE_GRACE_S = 5.0  # beyond the engine's own deadline: a slow answer is better than none
TERMINATE_S = 5.0  # from SIGTERM to SIGKILL of a server process
REAP_S = 10.0  # from SIGKILL until the kernel has removed the process
BROKEN_CONNECTION_S = 0.5  # from a broken connection to the end of the process that held it
REQUEST_S = 600.0  # base limit of a request, for its time in the queue; each token adds TOKEN_S
TOKEN_S = 1.0  # one token of the longest response, on a full engine
ABORT_S = 10.0  # from the abort of a request to the answer with its tokens so far
LAST_TOKEN_S = 30.0  # the token in progress when an embedded engine closes
KILL_ENGINE_S = 30.0  # the fleet's wait for an engine's end; more than TERMINATE_S + REAP_S
CLOSE_ENGINES_S = 30.0  # close of a transport or a service
REWARD_START_S = 120.0  # imports of the user's reward modules in a worker
AUDIT_S = 10.0  # the audit of a reward while the engines start; usual rewards take half a second
STRAYS_S = 2.0  # kill of processes that a reward or a sandboxed program left behind
MCP_CLOSE_S = 10.0  # end of an MCP server; its package asks, then kills, within 7 s
SANDBOX_START_S = 30.0  # namespaces, mounts and an interpreter, before a program's own time
FUSION_GRACE_S = 15.0  # beyond a SandboxFusion server's own limits, for its queue
FIRST_REQUEST_S = 10.0  # the first request on a new connection to one of our HTTP servers
SILENT_BODY_S = 60.0  # silence of a client in the middle of a request, before a refusal
GATEWAY_STARTS_S = 30.0  # start of the endpoint for agent programs
GATEWAY_CLOSES_S = 1.0  # answers to its open requests, at the end of a run
WORKER_ENDS_S = 1.0  # from a worker's closed socket to its exit code

# --- weight publication ---------------------------------------------------------------------------

TRANSPORT_GRACE_S = 10.0  # more than ENGINE_GRACE_S: an engine keeps its own deadlines first
GROUP_JOIN_S = 60.0  # rendezvous of both sides of a process group
ENGINE_ENDING_S = 45.0  # beyond update_timeout_s, to give up and end a hung engine

# --- the trainer's ranks --------------------------------------------------------------------------

STEP_GRACE_S = 60.0  # more than LOOP_GRACE_S: rank 0 knows which engine it waits for
FREED_S = 30.0  # an engine's other ranks, after the first one has released its memory
BLAME_S = 3.0  # from a broken collective to the report of the peer that failed
CHECKPOINT_TENSOR_S = 30.0  # the tensor being written, if a run ends during a checkpoint
UPLOAD_S = 300.0  # wandb's upload at the end of a run; the rest stays on the disk

# --- launchers ------------------------------------------------------------------------------------

INTERPRETER_S = 120.0  # an interpreter's report of its versions, with torch from a cold disk
NVIDIA_SMI_S = 30.0  # an answer of nvidia-smi, which hangs if the driver is broken
STORE_S = 60.0  # connection to a key-value store that is known to exist
REPORT_GRACE_S = 5.0  # from a run's failure to the end of a rank that has not seen the failure
LEAVE_S = 45.0  # the same for a rank that is still closing things; more than CLOSE_ENGINES_S
SAME_SIGNAL_S = 1.0  # between the same signal's arrival at a rank and from its launcher
SIGNALLED_S = 5.0  # silence after which a peer counts as lost, once this process must end
STALL_S = 10.0  # gap between two polls of the peers that means the watcher itself stood still
END_RANK_S = 10.0  # from SIGTERM to SIGKILL of a rank
STACKS_S = 1.0  # dump of the stacks of a hung process
EXIT_S = 15.0  # from the end of a command to the end of its process, despite plugins' threads
REPORT_S = 10.0  # the message of the rank that reports to the user, before other ranks leave

# --- the run's folder -----------------------------------------------------------------------------

OWNER_BEAT_S = 10.0  # between signs of life in an owner file, on file systems without locks
OWNER_LOST_S = 45.0  # silence after which the owner of a folder counts as gone; over four beats

# --- the rollout service, a child of rank 0 -------------------------------------------------------

SERVICE_GRACE_S = 60.0  # beyond the service's own limits, which must end first
SERVICE_ANSWER_S = 60.0  # an answer of the service that needs no work
CLOSE_SERVICE_S = 20.0  # close of the service, at the end of a run

# --- Ray ------------------------------------------------------------------------------------------

END_SERVER_S = 15.0  # end of a server by its engine's actor: TERMINATE_S + REAP_S
ACTOR_END_S = 10.0  # until the names of ended actors are free again
ACTOR_LOST_S = 30.0  # until Ray reports the end of a killed actor
PROCESS_LOST_S = 3.0  # until Ray reports the end of a process, which its peers see at once
RAY_REACH_S = 10.0  # connection to the port of a Ray cluster
STATUS_ANSWER_S = 15.0  # an answer of a run's status actor to another shell
