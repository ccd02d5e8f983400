"""`rlcore doctor`: looks at a machine and its environments, and says what a run would lack.

It works without torch and without a GPU: everything that needs torch is asked of another process.

    finding.py       one line: what was found, what is needed, what to do
    needs.py         what a configuration asks of the machine
    environments.py  both environments: packages, NCCL, kernels
    gpus.py          driver, GPUs and their free memory
    machine.py       shared memory, open files, disk, locks, clock
    network.py       interfaces, what a peer connects to, Ray, Slurm, keys
    examination.py   all of them, and the cheap ones for the start of a run
"""
