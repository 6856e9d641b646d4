// Package transport drives the machine of package rpcrdma over a reliable queue
// pair of any verbs provider: an [End] owns the queue pair, the buffers that
// messages are sent from and arrive in, and the memory that peers may reach
// while a call lasts.
//
// Connections are made by rdmacm (InfiniBand and RoCE) or softiwarp (iWARP); both
// carry the private data of RFC 8797. See [DialRoCE], [AcceptRoCE], [DialIWARP]
// and [AcceptIWARP].
//
// Missing: memory windows, so that a call's memory is registered anew for each
// call; FRMR pools; more than one completion queue; calls that a server makes to
// its client.
package transport
