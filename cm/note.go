package cm

import (
	"fmt"
	"strings"

	"ipoibcm/counters"
	"ipoibcm/wire/mad"
)

// String prints n in one line.
func (n Note) String() string {
	var parts []string
	add := func(show bool, format string, v any) {
		if show {
			parts = append(parts, fmt.Sprintf(format, v))
		}
	}
	switch n.Dir {
	case Sent:
		add(true, "sent %s", n.Message)
	case Received:
		add(true, "received %s", n.Message)
	}
	add(n.Inband, "%s", "in-band")
	add(n.Repeat, "%s", "again")
	add(n.LocalCommID != 0, "comm=%v", n.LocalCommID)
	add(n.RemoteCommID != 0, "remote=%v", n.RemoteCommID)
	add(n.QPN != 0, "qpn=%v", n.QPN)
	add(n.ServiceID != 0, "service=%v", n.ServiceID)
	add(n.Reason != 0, "reason=%d", uint16(n.Reason))
	add(n.Reason != 0, "(%v)", n.Reason)
	add(n.Drop != NotDropped, "dropped: %v", n.Drop)
	add(n.State != StateIdle, "in %v", n.State)
	line := strings.Join(parts, " ")
	switch {
	case n.Text == "":
		return line
	case n.Dir == Decided && line != "":
		return n.Text + " (" + line + ")"
	case line == "":
		return n.Text
	}
	return line + ": " + n.Text
}

// messages are the message types with counters of their own. The counter of the last one is that of all
// other types too.
var messages = [...]mad.AttrID{mad.AttrREQ, mad.AttrMRA, mad.AttrREJ, mad.AttrREP, mad.AttrRTU, mad.AttrDREQ,
	mad.AttrDREP, mad.AttrSIDRREQ, mad.AttrSIDRREP, mad.AttrLAP, mad.AttrAPR, mad.AttrClassPortInfo}

var messageNames = [len(messages)]string{"req", "mra", "rej", "rep", "rtu", "dreq", "drep", "sidr_req", "sidr_rep",
	"lap", "apr", "class_port_info"}

// attrIndex returns the index in messages under which a is counted.
func attrIndex(a mad.AttrID) int {
	if i := int(a) - int(mad.AttrREQ); i >= 0 && i < len(messages)-1 {
		return i
	}
	return len(messages) - 1
}

// byMessage holds counters by index in messages, byDrop by reason.
type (
	byMessage [len(messages)]uint64
	byDrop    [numDrops]uint64
)

// Name returns the name of counter i.
func (*byMessage) Name(i int) string { return messageNames[i] }

// Name returns the name of counter d; "" for NotDropped.
func (*byDrop) Name(d int) string { return Drop(d).String() }

// counts are the counters of a Manager.
type counts struct {
	tx         byMessage `name:"tx_"` // repeats included
	rx         byMessage `name:"rx_"`
	retried    byMessage `name:"retry_"` // sent again
	duplicates byMessage `name:"dup_"`   // received more than once
	drops      byDrop    `name:"drop_"`

	refusedConns    uint64 `name:"refused_max_conns"`
	refusedHalfOpen uint64 `name:"refused_max_half_open"`
	evicted         uint64 `name:"evicted_rejected"`
	evictedHalfOpen uint64 `name:"evicted_half_open"`
	challenges      uint64 `name:"challenges"` // DREQs that ask whether a connection is lost
}

// Counters calls f for every counter, in a fixed order.
func (m *Manager) Counters(f func(name string, value uint64)) { counters.Each(&m.counts, f) }

// took notes that the MAD at hand was accepted, or was answered without a connection.
func (m *Manager) took(c *conn, text string) {
	m.follow(c)
	n := m.rx.note
	n.Text = text
	m.note(c, n)
}

// duplicate notes that the MAD at hand came before.
func (m *Manager) duplicate(c *conn) {
	m.follow(c)
	n := m.rx.note
	n.Repeat = true
	m.counts.duplicates[attrIndex(m.rx.attr)]++
	m.note(c, n)
}

// drop notes and counts that the MAD at hand changed nothing.
func (m *Manager) drop(c *conn, why Drop, text string) {
	m.counts.drops[why]++
	n := m.rx.note
	n.Drop, n.Text = why, text
	m.note(c, n)
}

// decide notes something that no message shows.
func (m *Manager) decide(c *conn, text string) {
	m.note(c, Note{Dir: Decided, Remote: c.p.Remote, ServiceID: c.p.ServiceID, LocalCommID: c.p.LocalCommID,
		RemoteCommID: c.p.RemoteCommID, QPN: c.p.LocalQPN, Text: text})
}

func (m *Manager) note(c *conn, n Note) {
	if c != nil {
		n.Handle, n.State = c.handle, c.state
	}
	m.act(n)
}

// describe makes the Note of a message. dir says which of its communication IDs is ours.
func describe(msg mad.Message, dir Dir) Note {
	n := Note{Dir: dir, Message: msg.Attr().String()}
	from, to := &n.LocalCommID, &n.RemoteCommID
	if dir == Received {
		from, to = to, from
	}
	switch msg := msg.(type) {
	case mad.REQ:
		*from, n.ServiceID, n.QPN = msg.LocalCommID, msg.ServiceID, msg.LocalQPN
	case mad.MRA:
		*from, *to = msg.LocalCommID, msg.RemoteCommID
	case mad.REJ:
		*from, *to, n.Reason = msg.LocalCommID, msg.RemoteCommID, msg.Reason
	case mad.REP:
		*from, *to, n.QPN = msg.LocalCommID, msg.RemoteCommID, msg.LocalQPN
	case mad.RTU:
		*from, *to = msg.LocalCommID, msg.RemoteCommID
	case mad.DREQ:
		*from, *to, n.QPN = msg.LocalCommID, msg.RemoteCommID, msg.RemoteQPN
	case mad.DREP:
		*from, *to = msg.LocalCommID, msg.RemoteCommID
	case mad.SIDRREQ:
		*from, n.ServiceID = msg.RequestID, msg.ServiceID
	case mad.SIDRREP:
		*from, n.ServiceID, n.QPN = msg.RequestID, msg.ServiceID, msg.QPN
	case mad.LAP:
		*from, *to, n.QPN = msg.LocalCommID, msg.RemoteCommID, msg.RemoteQPN
	case mad.APR:
		*from, *to = msg.LocalCommID, msg.RemoteCommID
	}
	return n
}
