package agent

import (
	"context"
	"encoding/binary"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/long"
	"ipoibcm/ipoib"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// newAgentAmong returns an agent with n peers, each a neighbour with a connection.
func newAgentAmong(t testing.TB, n int) *Agent {
	a, _ := newAgentOf(t, func(o *ipoib.Options) {
		o.NoGSI = false
		o.MaxPeers, o.MaxConns, o.CM.MaxConns, o.Neigh.MaxNeighbors = 2*n, n+n/8+64, 4*n+64, 2*n
		o.Neigh.RequestRate, o.Neigh.SourceRate, o.CM.REQsPerSecond, o.CM.RepliesPerSecond = -1, -1, -1, -1
	})
	now, qpn := time.Now(), ib.QPN(0x200000)
	var pending []ipoib.Event
	for i := range n {
		gid := ib.GID{0: 0xfe, 1: 0x80, 8: 2}
		binary.BigEndian.PutUint32(gid[12:], uint32(i))
		link := encap.LinkAddr{Flags: encap.FlagRC, QPN: ib.QPN(0x1000 + i), GID: gid}
		frame, err := arp.NewRequest(link, netip.AddrFrom4([4]byte{10, 0, byte(1 + i>>8), byte(i)}),
			netip.AddrFrom4([4]byte{10, 0, 0, 1})).
			AppendBinary([]byte{byte(encap.ARP >> 8), byte(encap.ARP & 0xff), 0, 0})
		if err != nil {
			t.Fatal(err)
		}
		req := mad.REQ{TransactionID: uint64(i), LocalCommID: mad.CommID(1 + i),
			ServiceID:   serviceid.New(serviceid.RFC, a.link.QPN),
			LocalCAGUID: ib.GUID(i + 2), LocalQPN: 0x400000 + ib.QPN(i), RemoteCMResponseTimeout: 16, LocalCMResponseTimeout: 16,
			Transport: ib.RC, StartingPSN: 1, RetryCount: 7, RNRRetryCount: 7, PKey: ib.DefaultPKey, PathMTU: ib.MTU4096,
			MaxCMRetries: 7,
			Primary: mad.PathInfo{LocalLID: ib.PermissiveLID, RemoteLID: ib.PermissiveLID, LocalGID: gid, RemoteGID: gidA,
				HopLimit: 64, LocalACKTimeout: 14}}
		private, _ := encap.PrivateData{QPN: link.QPN, ReceiveMTU: 65524}.AppendBinary(nil)
		copy(req.PrivateData[:], private)
		in := &verbs.MAD{Remote: gid, Local: gidA, QPN: ib.QPNGSI, PKey: ib.DefaultPKey}
		if _, err := req.AppendBinary(in.Data[:0]); err != nil {
			t.Fatal(err)
		}
		pending = append(pending, ipoib.RecvFrame{SrcGID: gid, SrcQPN: link.QPN, DstGID: gidA, Frame: frame},
			ipoib.RecvMAD{MAD: in})
		for len(pending) > 0 {
			ev := pending[0]
			pending = pending[1:]
			now = now.Add(time.Microsecond)
			for _, act := range a.m.Step(nil, now, ev) {
				switch act := act.(type) {
				case ipoib.CreateQP:
					qpn++
					pending = append(pending, ipoib.QPCreated{Conn: act.Conn, QPN: qpn})
				case ipoib.SendMAD:
					pending = append(pending, ready(t, act.MAD, private)...)
				}
			}
		}
	}
	return a
}

// ready is what the peer says to a REP.
func ready(t testing.TB, m *verbs.MAD, private []byte) []ipoib.Event {
	_, msg, err := mad.Parse(m.Data[:])
	rep, ok := msg.(mad.REP)
	if err != nil || !ok {
		return nil
	}
	rtu := mad.RTU{TransactionID: rep.TransactionID, LocalCommID: rep.RemoteCommID, RemoteCommID: rep.LocalCommID}
	copy(rtu.PrivateData[:], private)
	in := &verbs.MAD{Remote: m.Remote, Local: gidA, QPN: ib.QPNGSI, PKey: ib.DefaultPKey}
	if _, err := rtu.AppendBinary(in.Data[:0]); err != nil {
		t.Fatal(err)
	}
	return []ipoib.Event{ipoib.RecvMAD{MAD: in}}
}

// A list holds the driver for far less than a millisecond at a time, however many peers there are.
func TestListsHoldTheDriverShortly(t *testing.T) {
	const most = time.Millisecond
	peers := 10_000
	if long.Race && !long.Form() {
		peers = 500 // everything takes ten times as long, and is no different
	}
	a := newAgentAmong(t, peers)
	if got := a.m.Status(); got.Neighbours != peers {
		t.Fatalf("%d neighbours, want %d", got.Neighbours, peers)
	}
	if got := len(a.m.Conns()); got != peers {
		t.Fatalf("%d connections, want %d", got, peers)
	}
	began := time.Now()
	joinPeers(slices.Collect(a.neighbourUses), slices.Collect(a.connUses(false)), began)
	t.Logf("all at once: %v", time.Since(began))
	h := a.handler()
	for _, path := range []string{control.PathStatus, control.PathConns, control.PathNeigh, control.PathRoutes,
		control.PathStats, control.PathMembers, control.PathMetrics} {
		var least time.Duration
		for try := range 200 { // others want the processor too
			busy, wall, turns := held(t, a, h, path)
			if try == 0 || busy < least {
				least = busy
			}
			t.Logf("%-12s held the driver %d times, for %v of processor time at most (%v)", path, turns, busy, wall)
			if least < most {
				break
			}
		}
		if least >= most {
			t.Errorf("%s: the driver was held for %v, want less than %v", path, least, most)
		}
	}
}

// held serves path, and returns how much processor time the driver gave to it at most at a time, how
// long that took beside others, and how often it did.
func held(t *testing.T, a *Agent, h http.Handler, path string) (busy, wall time.Duration, turns int) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	w := httptest.NewRecorder()
	go func() {
		defer stop()
		h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, "GET", path, nil))
	}()
	for {
		select {
		case q := <-a.queries:
			began, cpu := time.Now(), threadTime(t)
			q()
			took := time.Since(began)
			// Whoever was moved to another thread has no better figure than the time that passed.
			busy, wall, turns = max(busy, min(took, threadTime(t)-cpu)), max(wall, took), turns+1
		case <-ctx.Done():
			if w.Code != http.StatusOK {
				t.Errorf("%s: status %d: %s", path, w.Code, w.Body)
			}
			return busy, wall, turns
		}
	}
}

// threadTime returns the processor time of this thread.
func threadTime(t *testing.T) time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		t.Fatal(err)
	}
	return time.Duration(now.Nano())
}

// Entries that come and go while a list is gathered are in it or not, and all others are, once.
func TestGatherWhileThingsChange(t *testing.T) {
	a, _ := newAgent(t)
	m := map[int]bool{}
	for i := range 3000 {
		m[i] = true
	}
	ctx, stop := context.WithCancel(t.Context())
	go func() {
		for next := 3000; ; next++ {
			select {
			case q := <-a.queries:
				q()
				delete(m, next-1) // what came last goes
				m[next] = true
			case <-ctx.Done():
				return
			}
		}
	}()
	got, err := gather(ctx, a, func(yield func(int) bool) {
		for i := range m {
			if !yield(i) {
				return
			}
		}
	})
	stop()
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(got)
	if n := len(slices.Compact(slices.Clone(got))); n != len(got) {
		t.Errorf("%d of %d elements are there twice", len(got)-n, len(got))
	}
	for i := range 2999 {
		if got[i] != i {
			t.Fatalf("element %d is %d", i, got[i])
		}
	}
}
