"""Kubernetes: a CSI plugin of a node; a checkout is an ephemeral inline volume of a pod.

    python -m mirrord.integrations.kubernetes --endpoint unix:///csi/csi.sock --node NAME

`volumes.py` says what publishing means, `server.py` speaks gRPC. `csi.proto` is of release 1.12.0
of the CSI specification; `csi_pb2*` are generated from it, in the project's directory, by

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
        mirrord/integrations/kubernetes/csi.proto
"""
