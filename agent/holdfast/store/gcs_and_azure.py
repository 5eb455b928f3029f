"""Checkpoints in a bucket of Google Cloud Storage, or in a container of Azure Blob Storage.

Their guarantees are those that `object_keys` needs, and those of `Bucket`. An object is created only if there is
none (`x-goog-if-generation-match: 0`, `If-None-Match: *`), and copied by the server.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast.store.http_place import DENIED, METADATA, NO_BUCKET, HttpPlace, answers
from holdfast.store.objects import ObjectStore, open_bucket

if TYPE_CHECKING:
    from obstore.store import AzureConfig, AzureStore, GCSConfig, GCSStore

_APPLICATION_DEFAULT = Path(".config/gcloud/application_default_credentials.json")
_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"


def open_gcs(url: str) -> ObjectStore:
    """Open the store at `gs://bucket/prefix`; ValueError for another address, or without obstore."""
    return open_bucket(url, "gcs", GCSPlace)


def open_azure(url: str) -> ObjectStore:
    """Open the store at `az://container/prefix`; ValueError for another address, or without obstore."""
    return open_bucket(url, "azure", AzurePlace)


class GCSPlace(HttpPlace):
    """A prefix in a bucket of Google Cloud Storage, configured by the variables of Google's own tools."""

    address_variables = ("GOOGLE_BASE_URL",)
    address_variable = "GOOGLE_BASE_URL"
    credentials = (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_BEARER_TOKEN",
    )
    skip_variable = "GOOGLE_SKIP_SIGNATURE"
    no_credentials = (
        "no credentials for {bucket} at {server}: set GOOGLE_APPLICATION_CREDENTIALS, or run "
        "`gcloud auth application-default login`"
    )
    rejected = "{server} rejects the credentials for {bucket}: check the variables that begin with GOOGLE_"
    codes: ClassVar = {"NoSuchBucket": (errno.ENOENT, NO_BUCKET)}

    def __init__(self, bucket: str, prefix: str) -> None:
        server = self.address(os.environ) or "Google Cloud Storage"
        super().__init__(f"gs://{bucket}/{prefix}".rstrip("/"), bucket, prefix, server)

    def has_credentials(self, environment: Mapping[str, str]) -> bool:
        host = environment.get("GCE_METADATA_HOST") or "metadata.google.internal"
        return (
            super().has_credentials(environment)
            or (Path.home() / _APPLICATION_DEFAULT).exists()
            or answers(f"http://{host}")
        )

    def client(self, address: str | None, **options: Any) -> GCSStore:
        from obstore.store import GCSStore

        config: GCSConfig = {"base_url": address} if address else {}
        return GCSStore(self.bucket, prefix=self.prefix or None, config=config, **options)


class AzurePlace(HttpPlace):
    """A prefix in a container of Azure Blob Storage, configured by the usual AZURE_* variables."""

    noun = "container"
    copies_later = True
    address_variables = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    address_variable = "AZURE_STORAGE_ENDPOINT"
    credentials = (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_MASTER_KEY",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_TOKEN",
        "AZURE_STORAGE_CLIENT_SECRET",
        "AZURE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_MSI_ENDPOINT",
        "AZURE_IDENTITY_ENDPOINT",
        "AZURE_USE_AZURE_CLI",
    )
    skip_variable = "AZURE_SKIP_SIGNATURE"
    no_credentials = (
        "no credentials for {bucket} at {server}: set AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_SAS_TOKEN, "
        "or AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET"
    )
    rejected = (
        "{server} rejects the credentials for {bucket}: check the variables that begin with AZURE_, and the clock "
        "of this machine"
    )
    codes: ClassVar = {
        "ContainerNotFound": (errno.ENOENT, NO_BUCKET),
        "ContainerBeingDeleted": (errno.ENOENT, NO_BUCKET),
        "AuthenticationFailed": (errno.EACCES, rejected),
        "AuthorizationPermissionMismatch": (errno.EACCES, f"{DENIED} (role Storage Blob Data Contributor)"),
    }

    def __init__(self, bucket: str, prefix: str) -> None:
        server = self.address(os.environ) or f"Azure account {os.environ.get(_ACCOUNT, '(not named)')}"
        super().__init__(f"az://{bucket}/{prefix}".rstrip("/"), bucket, prefix, server)

    def require_credentials(self, environment: Mapping[str, str]) -> None:
        if not environment.get(_ACCOUNT):
            raise self.error(
                errno.EACCES, "{variable} is not set: give the storage account of {bucket}", variable=_ACCOUNT
            )
        super().require_credentials(environment)

    def has_credentials(self, environment: Mapping[str, str]) -> bool:
        return super().has_credentials(environment) or answers(METADATA)

    def client(self, address: str | None, **options: Any) -> AzureStore:
        from obstore.store import AzureStore

        config: AzureConfig = {"endpoint": address} if address else {}
        return AzureStore(self.bucket, prefix=self.prefix or None, config=config, **options)
