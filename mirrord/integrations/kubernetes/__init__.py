"""Kubernetes: a CSI node plugin, by which an ephemeral inline volume of a pod is a checkout.

    python -m mirrord.integrations.kubernetes --endpoint unix:///csi/csi.sock --node NAME

`volumes.py` publishes volumes, `server.py` serves gRPC. `csi.proto` is from release 1.12.0 of the
CSI specification. `csi_pb2*` are generated from it, in the project's directory, by

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
        mirrord/integrations/kubernetes/csi.proto
"""
