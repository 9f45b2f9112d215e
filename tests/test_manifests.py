"""The examples for Kubernetes are what its schemas allow, for the oldest and the newest version that documents name."""

from pathlib import Path
from typing import Any

import pytest
import yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate")

MANIFESTS = Path(__file__).parent.parent / "examples" / "kubernetes"
VERSIONS = ("1.30", "1.37")
DOCUMENTS = [
    pytest.param(document, id=f"{path.name}-{document['kind']}")
    for path in sorted(MANIFESTS.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_manifest_is_valid(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_unknown_field_is_refused(document: dict[str, Any], version: str) -> None:
    with pytest.raises(kubernetes_validate.ValidationError, match="hostz"):
        kubernetes_validate.validate({**document, "spec": {**document["spec"], "hostz": 1}}, version, strict=True)
