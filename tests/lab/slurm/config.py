"""The slurm.conf of a cluster."""

from __future__ import annotations

# The machine has fewer processors and less memory than its nodes say.
CONFIG = """\
ClusterName=lab
SlurmctldHost=ctl({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is put back into the queue stays there until its credential has expired, else for 120 s.
AuthInfo=socket={folder}/munge.socket,cred_expire={expire}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
{accounting}
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1024
SlurmdParameters=config_overrides
{plugins}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
# A machine that is busy for some seconds has lost no node, and no batch script.
SlurmdTimeout=15
BatchStartTimeout=60
SlurmctldTimeout=10
MessageTimeout={patience}
TCPTimeout=1
InactiveLimit=0
KillWait=5
UnkillableStepTimeout=120
OverTimeLimit=0
MinJobAge=300
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} CoresPerSocket={cpus} RealMemory=65536 Gres=gpu:a100:{gpus} State=UNKNOWN
{nodes}
PartitionName=DEFAULT Nodes=ALL State=UP MaxTime=INFINITE
PartitionName=main Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=urgent PriorityTier=10 PreemptMode=OFF
PartitionName=short PriorityTier=1 MaxTime=1 PreemptMode=OFF
"""
