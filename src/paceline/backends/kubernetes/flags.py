"""The flags of the Kubernetes backend; what they set is in `options.Options`."""

from __future__ import annotations

from paceline.backends.base import Flag

_KINDS = ("job", "pytorchjob", "mpijob", "tfjob", "paddlejob", "trainjob", "jobset")
_GANGS = ("volcano", "coscheduling")
_PODS = ("none", "running", "all")
FLAGS = (
    Flag("context", ("--context",), "NAME", "Context of the kubeconfig.  [default: the current one]"),
    Flag("namespace", ("--namespace",), "NAME", "Namespace in the cluster.  [default: the context's]"),
    Flag("kind", ("--kind",), "KIND", f"Object: {', '.join(_KINDS[:-1])} or {_KINDS[-1]}.", job=True, values=_KINDS),
    Flag("worker_image", ("--worker-image",), "IMAGE", "Image of all pods but the first one.", job=True),
    Flag("gang", ("--gang",), "SCHEDULER", f"Start the pods together: {' or '.join(_GANGS)}.", job=True, values=_GANGS),
    Flag("runtime", ("--runtime",), "NAME", "ClusterTrainingRuntime of a TrainJob.", job=True),
    Flag(
        "clean_pods",
        ("--clean-pods",),
        "WHICH",
        "Pods that are deleted at the end: none, running or all.",
        job=True,
        values=_PODS,
    ),
    Flag("plain", ("--plain",), "", "Run the command itself in its image, without an agent.", is_switch=True, job=True),
    Flag("python", ("--image-python",), "PYTHON", "Python in the image.  [default: python3]", job=True),
    Flag("gpu_resource", ("--gpu-resource",), "NAME", "What --gpus counts.  [default: nvidia.com/gpu]", job=True),
    Flag("resources", ("--resources",), "NAME=N,…", "More resources of each pod, such as rdma/hca=1.", job=True),
    Flag("shm", ("--share-memory",), "SIZE", "Size of /dev/shm.  [default: what the memory allows]", job=True),
    Flag("pull_policy", ("--pull-policy",), "POLICY", "When to pull it: Always, IfNotPresent or Never.", job=True),
    Flag("pull_secrets", ("--pull-secret",), "NAME,…", "Secrets with which the image is pulled.", job=True),
    Flag("git_image", ("--git-image",), "IMAGE", "Image that fetches code by git.  [default: the job's]", job=True),
    Flag("git_secret", ("--git-secret",), "NAME", "Secret with a password or an ssh key for git.", job=True),
    Flag("selector", ("--selector",), "NAME=VALUE,…", "Labels of the nodes for the pods.", job=True),
    Flag("tolerations", ("--toleration",), "KEY[=VALUE][:EFFECT],…", "Taints that are tolerated, or all.", job=True),
    Flag("placement", ("--placement",), "spread|pack", "Prefer a node for each pod, or few.", job=True),
    Flag("topology", ("--topology",), "host|zone|LABEL", "What to spread or pack over.  [default: host]", job=True),
    Flag("run_as", ("--run-as",), "UID[:GID]|image", "User of all processes; image: its own, not root.", job=True),
    Flag("capabilities", ("--capabilities",), "NAME,…", "Linux capabilities to keep, or default.", job=True),
    Flag("work_size", ("--work-size",), "SIZE", "What a pod may write to its own folder, as 20Gi.", job=True),
    Flag("priority_class", ("--priority-class",), "NAME", "PriorityClass of the pods.", job=True),
    Flag("service_account", ("--service-account",), "NAME", "ServiceAccount of the pods.", job=True),
    Flag("annotations", ("--annotation",), "NAME=VALUE,…", "More annotations of job and pods.", job=True),
    Flag("host_network", ("--host-network",), "", "Pods use the network of their nodes.", is_switch=True, job=True),
    Flag("ports", ("--ports",), "PORT,…", "Ports that the containers declare.", job=True),
    Flag("pod_template", ("--pod-template",), "FILE", "YAML that is merged into the pod template.", job=True),
)
