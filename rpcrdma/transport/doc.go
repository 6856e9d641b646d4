// Package transport drives the machine of package rpcrdma over a reliable queue pair of any verbs
// provider. An [End] owns the queue pair, the buffers for messages sent and received, and the
// memory that peers may reach while a call lasts.
//
// Connections are made by rdmacm (InfiniBand and RoCE) or softiwarp (iWARP); both carry the private
// data of RFC 8797. See [DialRoCE], [AcceptRoCE], [DialIWARP] and [AcceptIWARP].
//
// Missing: memory windows and FRMR pools (each call registers its memory anew); more than one
// completion queue; calls that a server makes to its client.
package transport
