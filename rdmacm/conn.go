package rdmacm

import (
	"net/netip"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// A Conn is one connection.
type Conn struct {
	port   *Port
	handle cm.Handle
	setup  Setup
	psn    ib.PSN

	params  cm.Params // set by start
	private []byte
	why     error // an error of start, which replaces that of the CM
	err     error // why the connection did not come up; valid once settled is closed
	settled chan struct{}

	end  error
	done chan struct{}
}

// QP is the queue pair, in RTS while the connection is up and in ERR after it.
func (c *Conn) QP() verbs.QP { return c.setup.QP }

// Params returns the parameters that both sides have agreed on.
func (c *Conn) Params() cm.Params { return c.params }

// Private returns the peer's private data: of its REQ, without the header, or of its REP. It has
// the length of the message's field, however much of that the peer filled.
func (c *Conn) Private() []byte { return c.private }

// Remote returns the peer's address.
func (c *Conn) Remote() netip.Addr { return c.params.Remote.Addr().Unmap() }

// Settled is closed when the connection is up, or has failed. An accepted connection is up when the
// peer has shown, by an RTU or data, that it has the REP.
func (c *Conn) Settled() <-chan struct{} { return c.settled }

// Done is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err returns why the connection ended, once Done is closed. It is nil before that, after Close,
// and after a fatal error of the queue pair, upon which the Port calls Close.
func (c *Conn) Err() error {
	if !closed(c.done) {
		return nil
	}
	return c.end
}

// Received tells the Conn that a message has arrived on the queue pair, which shows as much as an
// RTU that was lost. The user must call it if the provider has no CommEst event.
func (c *Conn) Received() { c.port.do(cm.DataOnQP{QPN: c.setup.QP.QPN()}) }

// Close ends the connection with a DREQ and moves the queue pair to ERR. It does
// not wait for the peer's DREP.
func (c *Conn) Close() {
	if closed(c.done) {
		return
	}
	c.port.do(cm.Disconnect{Handle: c.handle})
	_ = c.setup.QP.Modify(verbs.QPAttr{State: verbs.StateError}) // gone already is as good
}

// settle closes settled, once; err is nil if the connection is up. port.mu is held.
func (c *Conn) settle(err error) {
	if !closed(c.settled) {
		c.err = err
		close(c.settled)
	}
}

// outcome returns c, or why it did not come up. settled is closed.
func (c *Conn) outcome() (*Conn, error) {
	if c.err != nil {
		return nil, c.err
	}
	return c, nil
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// start moves the queue pair to RTS.
func (c *Conn) start(p cm.Params) error {
	c.params = p
	for _, a := range []verbs.QPAttr{
		{State: verbs.StateRTR, Path: verbs.AHAttr{SGID: p.Local, DGID: p.Remote, FlowLabel: p.FlowLabel,
			TrafficClass: p.TrafficClass, HopLimit: p.HopLimit, SL: p.SL},
			PathMTU: p.PathMTU, DestQPN: p.RemoteQPN, RQPSN: c.psn, MaxDestRDAtomic: p.ResponderResources, MinRNRTimer: 12},
		{State: verbs.StateRTS, SQPSN: p.SendPSN, Timeout: ackTimeout(p.AckTimeout), RetryCount: p.RetryCount,
			RNRRetry: p.RNRRetry, MaxRDAtomic: p.InitiatorDepth},
	} {
		if err := c.setup.QP.Modify(a); err != nil {
			return err
		}
	}
	return nil
}

// ackTimeout bounds the ACK timeout that the peer asks for. No timeout, or one of hours, would keep
// a queue pair whose peer is gone. 18 is 1.07 s, and there are up to seven retries.
func ackTimeout(asked ib.Timeout) ib.Timeout {
	if asked == 0 || asked > 18 {
		return 18
	}
	return asked
}
