package agent

import (
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"ipoibcm/control"
	"ipoibcm/ipoib"
	"ipoibcm/wire/encap"
)

// subscriberDepth is how many events may wait for one slow follower.
const subscriberDepth = 1024

// maxFollowers bounds the clients that follow events at a time, and likewise those that follow packets.
const maxFollowers = 64

// pastDepth is how many past events are kept for followers that come later.
const pastDepth = 1024

// A hub hands events to whoever follows them. A follower that lags loses events
// and gets an event with their number.
type hub struct {
	mu      sync.Mutex
	subs    map[*subscriber]bool
	members int // of subs, those of users who may only look
	closed  bool
	lost    atomic.Uint64
	past    []control.Event // the last events, pastDepth at most
}

type subscriber struct {
	ch   chan control.Event
	lost uint64 // events lost since the follower was last told; guarded by hub.mu

	member bool // its user may only look
}

// subscribe returns a follower. It first gets the kept events after since; a zero since means none of them.
// member says that its user may only look. subscribe returns nil if there are too many followers, or too
// many of such users, or the hub is closed.
func (h *hub) subscribe(since time.Time, member bool) *subscriber {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || len(h.subs) >= maxFollowers || member && h.members >= maxMemberFollowers {
		return nil
	}
	if member {
		h.members++
	}
	if h.subs == nil {
		h.subs = map[*subscriber]bool{}
	}
	past := h.after(since)
	s := &subscriber{ch: make(chan control.Event, subscriberDepth+len(past)), member: member}
	for _, e := range past {
		s.ch <- e
	}
	h.subs[s] = true
	return s
}

// after returns the events after t that are kept, oldest first; none if t is zero. The lock is held.
func (h *hub) after(t time.Time) (events []control.Event) {
	for _, e := range h.past {
		if !t.IsZero() && e.Time.After(t) {
			events = append(events, e)
		}
	}
	return events
}

func (h *hub) unsubscribe(s *subscriber) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.subs[s] && s.member {
		h.members--
	}
	delete(h.subs, s)
}

// close ends every follower's stream.
func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for s := range h.subs {
		close(s.ch)
	}
	h.subs = nil
}

func (h *hub) publish(e control.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.past = append(h.past[max(0, len(h.past)+1-pastDepth):], e)
	for s := range h.subs {
		if s.lost > 0 && s.offer(control.Event{Version: control.Version, Time: e.Time, Part: "agent", Kind: "lost",
			Text: strconv.FormatUint(s.lost, 10) + " events lost: this follower is too slow"}) {
			s.lost = 0
		}
		if !s.offer(e) {
			s.lost++
			h.lost.Add(1)
		}
	}
}

// offer hands an event to the follower. It returns false if there is no room.
func (s *subscriber) offer(e control.Event) bool {
	select {
	case s.ch <- e:
		return true
	default:
		return false
	}
}

// event makes an event with the present time.
func (a *Agent) event(part, kind, text string) control.Event {
	return control.Event{Version: control.Version, Time: time.Now(), Part: part, Kind: kind, Text: text}
}

var noteParts = map[ipoib.NoteKind]string{
	ipoib.NoteCMSent: "cm", ipoib.NoteCMRecv: "cm", ipoib.NoteConn: "conn", ipoib.NoteCrossing: "conn",
	ipoib.NoteNeigh: "neigh", ipoib.NoteAddr: "neigh", ipoib.NoteGroup: "group", ipoib.NoteRoute: "mtu",
	ipoib.NoteLink: "agent",
}

// peerName prints a link-layer address, or as much of one as is known.
func peerName(l encap.LinkAddr) string {
	if l.QPN == 0 {
		return l.GID.String()
	}
	return l.String()
}

// note passes what the machine did to followers, to agents that ask for events, and to the log.
func (a *Agent) note(n ipoib.Note) {
	e := a.event(noteParts[n.Kind], string(n.Kind), n.Text)
	if !n.Peer.IsZero() {
		e.Peer = peerName(n.Peer)
	}
	if n.Kind == ipoib.NoteCMSent || n.Kind == ipoib.NoteCMRecv {
		e.Out = new(n.Kind == ipoib.NoteCMSent)
	}
	e.Fields = map[string]string{}
	if n.Addr.IsValid() {
		e.Fields["ip"] = n.Addr.String()
	}
	if n.Conn != 0 {
		e.Fields["conn"] = strconv.FormatUint(uint64(n.Conn), 10)
	}
	a.hub.publish(e)
	a.peers.Record(e)
	a.peers.Learn(n)
	switch fields := []any{"kind", n.Kind, "peer", e.Peer, "ip", e.Fields["ip"], "detail", n.Text}; {
	case n.Report == ipoib.NoReport:
		a.log.Debug("event", fields...)
	case n.Report.Urgent():
		a.log.Warn(n.Report.String(), fields...)
	default:
		a.log.Info(n.Report.String(), fields...)
	}
}
