package rpcrdma

import "time"

// refusedVersion sends k again in a version of the range that the responder has named, or closes
// the connection if there is none (draft section 6.2). The responder has not executed the call that
// it refused.
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

// assumeOne takes the peer to be of version one, because its answer to the first message was
// missing or useless: a peer that has never heard of version two may answer so. It closes the
// connection if the first message was of version one, or if we do not speak that.
func (c *Conn) assumeOne(dst []Action, now time.Time, k *call, err *Error) []Action {
	if k.vers != Version2 || !c.opts.speaks(Version1) {
		return c.close(dst, err)
	}
	c.count[err.Reason]++
	dst = append(dst, Learned{Version1, true})
	return c.again(dst, now, k, Version1)
}

// again sends a call from the beginning, in version v and with another XID.
func (c *Conn) again(dst []Action, now time.Time, k *call, v Version) []Action {
	c.version, c.negotiated = v, time.Time{}
	dst = c.releaseAll(dst, k)
	k.state, k.wide, k.room = callQueued, false, false
	return c.pump(dst, now)
}
