"""The CodaProfile: a profile artifact as a Kubernetes object, found by the digest of its spec key."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, ValidationError

from coda_engine.contract.errors import DocumentError, describe_validation_error
from coda_engine.contract.models import ReportedModel
from coda_engine.contract.profile import Profile
from coda_operator.spec import API_VERSION, PROFILE_KIND

SPEC_KEY_LABEL = "coda-serving.dev/spec-key"
"""Label with the spec key's digest; the operator finds a profile by it."""

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "coda-operator"
"""Value of the managed-by label on everything that the operator or its profiling Job makes."""


class CodaProfileSpec(ReportedModel):
    """A measured configuration: written by the profiling Job, read by the operator and by people."""

    spec_key_digest: str = Field(
        min_length=16, max_length=16, description="Digest of the spec key that the profile was measured for."
    )
    artifact: Profile = Field(description="The profile artifact, as engines take it.")

    @classmethod
    def parse(cls, spec: object) -> Self:
        """Return the specification in a CodaProfile's ``spec``.

        Raises:
            DocumentError: It cannot be read; names each field.
        """
        try:
            return cls.model_validate(spec)
        except ValidationError as error:
            raise DocumentError(describe_validation_error(error, "spec")) from error


def profile_name(spec_key_digest: str) -> str:
    """Return the name of the CodaProfile for a spec key."""
    return f"profile-{spec_key_digest}"


def profile_object(profile: Profile, namespace: str, owner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the CodaProfile that holds ``profile``.

    Args:
        profile: The artifact.
        namespace: Where it goes: profiles are found in their CodaCluster's namespace.
        owner: Owner reference of the CodaCluster that it was measured for; the object goes when its last
            owner goes.
    """
    digest = profile.full_key.spec.digest()
    spec = CodaProfileSpec(spec_key_digest=digest, artifact=profile)
    return {
        "apiVersion": API_VERSION,
        "kind": PROFILE_KIND,
        "metadata": {
            "name": profile_name(digest),
            "namespace": namespace,
            "labels": {SPEC_KEY_LABEL: digest, MANAGED_BY_LABEL: MANAGED_BY},
            "ownerReferences": [dict(owner)],
        },
        # The domain follows from the points: readers derive it, and the CRD has no field for it.
        "spec": spec.model_dump(mode="json", by_alias=True, exclude={"artifact": {"domain"}}, exclude_none=True),
    }
