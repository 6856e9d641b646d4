// Package rdmacm connects reliable queue pairs by IP address and port, as
// librdmacm does: the service ID is made from a TCP port, and the private data
// of a REQ begins with a header that says which addresses talk (IBA annex A11).
// Linux programs that use rdma_connect and rdma_accept, and the kernel's own
// users of rdma_cm, are the peers.
//
// A [Port] drives package cm on one QP 1; queue pairs are the user's. Bounds: as
// many connections as cm.Options.MaxConns, [MaxWaiting] requests that nobody has
// answered. Missing: UC, UD and SIDR, alternate paths, path records from a
// subnet manager (RoCE has none).
package rdmacm
