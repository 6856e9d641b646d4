// Package rdmacm connects reliable queue pairs by IP address and port, as librdmacm does: the
// service ID is made from a TCP port, and the private data of a REQ begins with a header that names
// the two addresses (IBA annex A11). Its peers are Linux programs that use rdma_connect and
// rdma_accept, and the kernel's own users of rdma_cm.
//
// A [Port] drives package cm on one QP 1; the queue pairs belong to the user. Bounds:
// cm.Options.MaxConns connections, and [MaxWaiting] unanswered requests per listener. Missing: UC,
// UD and SIDR, alternate paths, path records from a subnet manager (RoCE has none).
package rdmacm
