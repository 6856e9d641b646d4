package rpcrdma

import "time"

// refusedVersion sends k again in the highest version of the responder's range e.Low to e.High that
// we speak too and that it has not refused. It closes the connection if there is none (draft
// section 6.2). The responder has not executed the call that it refused.
func (c *Conn) refusedVersion(dst []Action, now time.Time, k *call, e TransportError) []Action {
	before := c.refused
	c.refused = k.vers
	v := min(e.High, c.opts.maxVersion())
	for v > 0 && (v == k.vers || v == before) { // that version would be refused again
		v--
	}
	if v < e.Low || v < c.opts.minVersion() {
		dst = append(dst, Learned{Version: 0})
		return c.close(dst, fault(ReasonNoVersion, "the peer has %d to %d, we have %d to %d", e.Low, e.High,
			c.opts.minVersion(), c.opts.maxVersion()))
	}
	dst = append(dst, Learned{Version: v})
	return c.again(dst, now, k, v)
}

// assumeOne sends k again in version one, because the answer to it, our first message, was missing
// or useless: a peer that does not know version two may answer so. It closes the connection if k
// was of version one already, or if we do not speak version one.
func (c *Conn) assumeOne(dst []Action, now time.Time, k *call, err *Error) []Action {
	if k.vers != Version2 || !c.opts.speaks(Version1) {
		return c.close(dst, err)
	}
	c.count[err.Reason]++
	dst = append(dst, Learned{Version1, true})
	return c.again(dst, now, k, Version1)
}

// silent handles the end of NegotiateTimeout, which k, our first message, has had no answer for. The
// probe goes out again in version one. A call of the user does not, because its program may be
// running: version one is assumed for later connections only, and an answer to k corrects that.
func (c *Conn) silent(dst []Action, now time.Time, k *call) []Action {
	switch {
	case k.probe:
		return c.assumeOne(dst, now, k, fault(ReasonTimeout, "of the first message"))
	case c.opts.speaks(Version1):
		dst = append(dst, Learned{Version1, true})
	}
	return dst
}

// again queues a call that was sent, to be sent anew in version v and with another XID.
func (c *Conn) again(dst []Action, now time.Time, k *call, v Version) []Action {
	c.version, c.negotiated = v, time.Time{}
	dst = c.releaseAll(dst, k)
	k.state, k.wide, k.room = callQueued, false, false
	return c.pump(dst, now)
}
