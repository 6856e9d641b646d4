package sa

import (
	"cmp"
	"time"

	"ipoibcm/ib"
	wire "ipoibcm/wire/sa"
)

// recv handles a MAD that came in.
func (c *Client) recv(in *MAD) {
	var m wire.Message
	if m.UnmarshalBinary(in.Data[:]) != nil {
		c.counters.drops[DropMalformed]++
		return
	}
	if !m.Method.IsResponse() {
		c.report(in, m)
		return
	}
	t := c.byTID[uint32(m.TransactionID)]
	switch {
	case t == nil:
		c.counters.drops[DropUnknown]++ // late, or for another user of the port
		return
	case in.Peer.LID != t.to.LID:
		c.counters.drops[DropSource]++
		return
	case m.Method != response(t.msg.Method):
		c.counters.drops[DropMethod]++
		return
	}
	c.heard = c.now
	switch {
	case m.Status&wire.StatusRedirect != 0:
		c.redirected(t, m)
	case m.Attr != t.msg.Record.Attr():
		c.counters.drops[DropMismatch]++
	case m.Status&wire.StatusBusy != 0:
		c.busy(t)
	case m.Status != 0:
		c.counters.refused[t.kind]++
		c.failed(t, Refused, m.Status)
	case !c.answered(t, m.Record):
		c.counters.drops[DropMismatch]++
	default:
		c.counters.answered[t.kind]++
	}
}

// response returns the method that answers m.
func response(m wire.Method) wire.Method {
	if m == wire.MethodDelete {
		return wire.MethodDeleteResp
	}
	return wire.MethodGetResp
}

// answered gives the record of an answer to the object that asked. It returns false if the record
// does not match the question.
func (c *Client) answered(t *task, r wire.Record) bool {
	switch t.kind {
	case kindGroup:
		return c.groupAnswered(t.group, r.(wire.MCMemberRecord))
	case kindPath:
		return c.pathAnswered(t.path, r.(wire.PathRecord))
	case kindTrap:
		return c.trapAnswered(t.trap, r.(wire.InformInfo))
	}
	c.probed(r.(wire.ClassPortInfo))
	return true
}

// busy handles a BUSY answer: t is sent again later. After more than MaxBusy in a row it fails,
// unless it is the probe.
func (c *Client) busy(t *task) {
	c.counters.busy++
	d := busyWait << min(t.busies, 8)
	t.busies++
	switch {
	case t == c.probe: // the administrator is alive, but all ports ask it
		d = min(d, maxProbeWait)
	case t.busies > c.opt.MaxBusy:
		c.failed(t, Busy, 0)
		return
	}
	d += c.jitter(d / 4)
	if t.kind == kindPath {
		d = min(d, t.path.giveUp.Sub(c.now))
	}
	c.pause(t, max(d, time.Millisecond))
}

// redirected handles a redirection to another port: all further questions are sent there (IBA
// 13.5.2).
func (c *Client) redirected(t *task, m wire.Message) {
	info, ok := m.Record.(wire.ClassPortInfo)
	l := info.Redirect
	t.hops++
	if !ok || l.LID == 0 || isMLID(l.LID) || l.QPN == 0 || t.hops > maxRedirects {
		c.counters.badRedirects++
		c.failed(t, Redirected, m.Status)
		return
	}
	if t.to == c.admin { // otherwise an earlier redirection has moved admin since t was sent
		c.counters.redirects++
		c.admin = Address{LID: l.LID, SL: l.SL, QPN: l.QPN, QKey: cmp.Or(l.QKey, ib.QKeyGSI), PKey: l.PKey}
		if c.port.GRHRequired {
			c.admin.GID, c.admin.FlowLabel, c.admin.TrafficClass = cmp.Or(l.GID, c.port.wellKnown()), l.FlowLabel, l.TrafficClass
		}
	}
	c.enqueue(t)
}
