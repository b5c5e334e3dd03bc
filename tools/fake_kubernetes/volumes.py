"""The volumes of a pod, and the variables of its containers."""

from __future__ import annotations

import base64
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import quantity, resources, sandbox
from .errors import Object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .storage import Storage


class MountError(Exception):
    """A volume that cannot be mounted yet, in the words of an event."""


class ConfigError(Exception):
    """A variable whose source is not there."""


class Volumes:
    """The folders of a pod's volumes."""

    def __init__(
        self, storage: Storage, pod: Object, folder: Path, claims: Path, token: Callable[[Object], str]
    ) -> None:
        self.storage, self.pod, self.folder, self.claims, self.token = storage, pod, folder, claims, token
        self.namespace = pod["metadata"]["namespace"]
        self.paths: dict[str, Path] = {}
        self._mounted: list[Path] = []

    def make(self) -> None:
        """Make all that are not made yet.

        Raises:
            MountError: something that one needs is missing.
        """
        for volume in self.pod["spec"].get("volumes") or []:
            name = volume["name"]
            if name in self.paths:
                continue
            kind = next(key for key in volume if key != "name")
            make = getattr(self, f"_{kind}", None)
            if make is None:
                raise MountError(f'MountVolume.SetUp failed for volume "{name}" : {kind} is not supported by the lab')
            self.paths[name] = make(name, volume[kind] or {})

    def remove(self) -> None:
        for path in self._mounted:
            sandbox.unmount(path)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _place(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _emptyDir(self, name: str, spec: Object) -> Path:
        path = self._place(name)
        path.chmod(0o777)
        if spec.get("medium") == "Memory":
            size = f",size={int(quantity.parse(spec['sizeLimit']))}" if spec.get("sizeLimit") else ""
            sandbox.mount("tmpfs", path, "tmpfs", 0, f"mode=1777{size}")
            self._mounted.append(path)
        return path

    def _hostPath(self, name: str, spec: Object) -> Path:
        path = Path(spec["path"])
        if spec.get("type") in ("DirectoryOrCreate",):
            path.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            raise MountError(f'MountVolume.SetUp failed for volume "{name}" : hostPath type check failed: {path}')
        return path

    def _persistentVolumeClaim(self, name: str, spec: Object) -> Path:
        claim = self.storage.get(resources.CLAIMS, self.namespace, spec["claimName"])
        if claim is None or claim["status"].get("phase") != "Bound":
            raise MountError(f'persistentvolumeclaim "{spec["claimName"]}" not found')
        return self.claims / f"{self.namespace}-{spec['claimName']}"

    def _configMap(self, name: str, spec: Object) -> Path:
        return self._files(name, [{"configMap": spec}], spec.get("defaultMode", 420))

    def _secret(self, name: str, spec: Object) -> Path:
        source = {**spec, "name": spec["secretName"]}
        return self._files(name, [{"secret": source}], spec.get("defaultMode", 420))

    def _downwardAPI(self, name: str, spec: Object) -> Path:
        return self._files(name, [{"downwardAPI": spec}], spec.get("defaultMode", 420))

    def _projected(self, name: str, spec: Object) -> Path:
        return self._files(name, spec["sources"], spec.get("defaultMode", 420))

    def _files(self, name: str, sources: list[Object], mode: int) -> Path:
        found = [item for source in sources for item in self._read(name, source)]
        path = self._place(name)
        # As a kubelet does it: files are links into a folder that a change replaces as a whole.
        version = path / datetime.now(timezone.utc).strftime("..%Y_%m_%d_%H_%M_%S.%f")
        version.mkdir()
        (path / "..data").symlink_to(version.name)
        for place, data, own in found:
            file = version / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            file.chmod(own or mode)
            top = place.partition("/")[0]
            if not (path / top).is_symlink():
                (path / top).symlink_to(f"..data/{top}")
        return path

    def _read(self, volume: str, source: Object) -> Iterator[tuple[str, bytes, int | None]]:
        kind, spec = next((key, value) for key, value in source.items() if value is not None)
        if kind == "serviceAccountToken":
            yield spec["path"], self.token(self.pod).encode(), None
            return
        if kind == "downwardAPI":
            for item in spec.get("items") or []:
                if "fieldRef" in item:
                    yield item["path"], field(self.pod, item["fieldRef"]["fieldPath"]).encode(), item.get("mode")
                else:
                    yield item["path"], _amount(self.pod, item["resourceFieldRef"], None).encode(), item.get("mode")
            return
        data = contents(self.storage, self.namespace, kind, spec["name"])
        if data is None:
            if spec.get("optional"):
                return
            word = "configmap" if kind == "configMap" else "secret"
            raise MountError(f'MountVolume.SetUp failed for volume "{volume}" : {word} "{spec["name"]}" not found')
        if spec.get("items") is None:
            yield from ((key, value, None) for key, value in data.items())
            return
        for item in spec["items"]:
            if item["key"] in data:
                yield item["path"], data[item["key"]], item.get("mode")
            elif not spec.get("optional"):
                words = f"references non-existent {'config' if kind == 'configMap' else 'secret'} key: {item['key']}"
                raise MountError(f'MountVolume.SetUp failed for volume "{volume}" : {words}')


def contents(storage: Storage, namespace: str, kind: str, name: str) -> dict[str, bytes] | None:
    """The data of a ConfigMap or a Secret, None if it is not there."""
    found = storage.get(resources.CONFIGMAPS if kind == "configMap" else resources.SECRETS, namespace, name)
    if found is None:
        return None
    if kind == "secret":
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}
    texts = {key: value.encode() for key, value in (found.get("data") or {}).items()}
    return {**texts, **{key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}}


def field(pod: Object, path: str) -> str:
    """What a fieldRef names."""
    head, bracket, key = path.partition("[")
    value: Any = pod
    for part in head.split("."):
        value = (value or {}).get(part)
    if bracket:
        value = (value or {}).get(key.rstrip("]").strip("'\""))
    elif isinstance(value, dict):
        return "\n".join(f'{name}="{text}"' for name, text in sorted(value.items()))
    return "" if value is None else str(value)


def _amount(pod: Object, reference: Object, container: Object | None) -> str:
    name = reference.get("containerName")
    if name:
        container = next(one for one in pod["spec"]["containers"] if one["name"] == name)
    kind, _, resource = reference["resource"].partition(".")
    text = (((container or {}).get("resources") or {}).get(kind) or {}).get(resource, "0")
    number = quantity.parse(text) / quantity.parse(reference.get("divisor") or "1")
    return str(-(-number.numerator // number.denominator))


def variables(storage: Storage, pod: Object, container: Object) -> dict[str, str]:
    """A container's own variables.

    Raises:
        ConfigError: a ConfigMap, a Secret or a key of theirs is missing.
    """
    result: dict[str, str] = {}
    namespace = pod["metadata"]["namespace"]
    for source in container.get("envFrom") or []:
        kind = "configMap" if "configMapRef" in source else "secret"
        reference = source[f"{kind}Ref"]
        data = contents(storage, namespace, kind, reference["name"])
        if data is None and not reference.get("optional"):
            raise ConfigError(f'{kind.lower()} "{reference["name"]}" not found')
        result.update({source.get("prefix", "") + key: value.decode() for key, value in (data or {}).items()})
    for each in container.get("env") or []:
        value = _value(storage, pod, container, each)
        if value is not None:
            result[each["name"]] = expand(value, result)
    return result


def _value(storage: Storage, pod: Object, container: Object, each: Object) -> str | None:
    source = each.get("valueFrom")
    if not source:
        return str(each.get("value") or "")
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"])
    if "resourceFieldRef" in source:
        return _amount(pod, source["resourceFieldRef"], container)
    kind = "configMap" if "configMapKeyRef" in source else "secret"
    reference = source[f"{kind}KeyRef"]
    namespace = pod["metadata"]["namespace"]
    data = contents(storage, namespace, kind, reference["name"])
    if data is not None and reference["key"] in data:
        return data[reference["key"]].decode()
    if reference.get("optional"):
        return None
    if data is None:
        raise ConfigError(f'{kind.lower()} "{reference["name"]}" not found')
    word = "ConfigMap" if kind == "configMap" else "Secret"
    raise ConfigError(f"couldn't find key {reference['key']} in {word} {namespace}/{reference['name']}")


def expand(text: str, variables: dict[str, str]) -> str:
    """Replace $(NAME), as Kubernetes does in commands, arguments and values."""
    result, rest = "", text
    while "$" in rest:
        before, _, rest = rest.partition("$")
        result += before
        if rest.startswith("$"):
            result, rest = f"{result}$", rest[1:]
        elif rest.startswith("(") and ")" in rest:
            name, _, after = rest[1:].partition(")")
            result += variables.get(name, f"$({name})")
            rest = after
        else:
            result += "$"
    return result + rest
