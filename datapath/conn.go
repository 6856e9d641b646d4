package datapath

import (
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// A Conn is a connected QP with the buffers of its queues.
type Conn struct{}

// NewConn creates a connected QP in RESET. recvMTU is the largest message in
// octets, header included, that its own receive ring must hold; with a shared
// receive queue it is at most Config.ReceiveMTU. The caller moves the QP through
// its states; after INIT it calls PostRecvs once.
func (l *Loop) NewConn(t ib.Transport, recvMTU int) (*Conn, error) { return nil, errTODO }

// QP returns the queue pair, for its QPN and Modify.
func (c *Conn) QP() verbs.QP { return nil }

// Transport returns RC or UC.
func (c *Conn) Transport() ib.Transport { return 0 }

// PostRecvs fills the receive ring; with a shared receive queue it does nothing.
// Call it in INIT or RTR, before the peer may send.
func (c *Conn) PostRecvs() error { return errTODO }

// Close destroys the QP and takes its buffers back. Paths must lead elsewhere
// by then; a packet that still finds c is dropped and counted. Closing twice is
// no error.
func (c *Conn) Close() error { return errTODO }

// ConnCounters are the counts of one connection.
type ConnCounters struct {
	TxPackets, TxOctets uint64 // IP packets posted, and their octets
	TxErrors            uint64 // completed with an error, flushes not included
	TxFlushed           uint64
	QueueFull           uint64 // dropped because the send queue stayed full
	Stalls              uint64 // times the queue stayed full without progress
	Queued              int    // posted and not completed
	RxPackets, RxOctets uint64
	RxErrors            uint64
	LastTx, LastRx      time.Time // exact to a batch; zero means never
	LastError           verbs.Status
}

// Counters returns c's counts.
func (c *Conn) Counters() ConnCounters { return ConnCounters{} }

// RecvMemory returns the octets of all receive rings that connections hold
// beside the shared receive queue.
func (l *Loop) RecvMemory() int { return 0 }
