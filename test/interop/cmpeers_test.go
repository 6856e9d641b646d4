package interop

import (
	"fmt"
	"testing"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/test/interop/vm"
	"ipoibcm/verbs"
)

// ucmatose opens several connections at once; each then carries messages from
// the server to the client and as many back.
const (
	ucmatosePort  = 7471
	ucmatoseConns = 8
	ucmatoseCount = 10
	ucmatoseSize  = 1500 // more than one packet
)

func ucmatose(h *cmHost, more ...string) *vm.Proc {
	return h.start(append([]string{"ucmatose", "-c", fmt.Sprint(ucmatoseConns), "-C", fmt.Sprint(ucmatoseCount), "-S",
		fmt.Sprint(ucmatoseSize)}, more...)...)
}

// atReply is where the replies are in the buffer of an end.
const atReply = 2000

func ucmatoseEnds(h *cmHost) []*end {
	ends := make([]*end, ucmatoseConns)
	for i := range ends {
		e := h.end(4000)
		for id := range uint64(ucmatoseCount) {
			e.postRecv(id, atReply, ucmatoseSize)
		}
		ends[i] = e
	}
	return ends
}

func (e *end) sendMany() {
	e.t.Helper()
	for i := range ucmatoseCount {
		e.send(uint64(i), 0, ucmatoseSize)
	}
	for range ucmatoseCount {
		e.sent()
	}
}

func (e *end) receiveMany() {
	e.t.Helper()
	for range ucmatoseCount {
		if wc := e.received(); wc.ByteLen != ucmatoseSize {
			e.t.Fatalf("received %+v", wc)
		}
	}
}

// disconnectAll ends connections, which ucmatose leaves to its server, and waits
// for the end of each.
func (h *cmHost) disconnectAll(handles []cm.Handle) {
	h.t.Helper()
	for _, n := range handles {
		h.cm.Do(cm.Disconnect{Handle: n})
	}
	ended := map[cm.Handle]bool{}
	for len(ended) < len(handles) {
		a, err := h.cm.Next(patience)
		if err != nil {
			h.t.Fatal(err)
		}
		d, ok := a.(cm.Disconnected)
		if !ok {
			continue // Released, of those before
		}
		switch {
		case ended[d.Handle]:
			h.t.Errorf("disconnected: %+v", d)
		case d.By == cm.ByStale:
			h.t.Errorf("disconnected: By is %v, want another than %v", d.By, cm.ByStale)
		case d.Reason != 0:
			h.t.Errorf("disconnected: Reason is %v, want 0", d.Reason)
		}
		ended[d.Handle] = true
	}
}

// TestManyConnections has ucmatose open eight connections to us, and us to it.
func TestManyConnections(t *testing.T) {
	w := open(t, 1500)
	for _, fam := range w.families(t) {
		t.Run(fam.name+"/TheyConnect", func(t *testing.T) { theyConnectMany(newCMHost(t, w, fam), fam) })
		t.Run(fam.name+"/WeConnect", func(t *testing.T) { weConnectMany(newCMHost(t, w, fam), fam) })
	}
}

// theyConnectMany: the guest's program asks for many connections, several before the first RTU.
func theyConnectMany(h *cmHost, fam family) {
	t := h.t
	t.Helper()
	h.cm.Do(cm.Listen{ServiceID: serviceid.RDMAIP(ucmatosePort)})
	ends := ucmatoseEnds(h)
	var handles []cm.Handle
	p := ucmatose(h, "-s", addr(fam.host))
	h.established(len(ends), func(a cm.Action) bool {
		r, ok := a.(cm.RequestReceived) // several before the first RTU
		if ok {
			e := ends[len(handles)]
			handles = append(handles, r.Handle)
			q := r.Params
			q.RecvPSN = startPSN
			h.rts(e, q)
			h.cm.Do(cm.Accept{Handle: r.Handle, QPN: e.qp.QPN(), StartingPSN: startPSN, RNRRetry: 7})
		}
		return ok
	})
	for _, e := range ends {
		e.sendMany()
	}
	for _, e := range ends {
		e.receiveMany()
	}
	h.disconnectAll(handles)
	if out, err := p.Wait(patience); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// established waits until n connections are up. What else our manager says step must know.
func (h *cmHost) established(n int, step func(cm.Action) bool) {
	h.t.Helper()
	for up := 0; up < n; {
		a, err := h.cm.Next(patience)
		if err != nil {
			h.t.Fatal(err)
		}
		if _, ok := a.(cm.Established); ok {
			up++
		} else if !step(a) {
			h.t.Fatalf("cm says %T %+v", a, a)
		}
	}
}

// weConnectMany: we ask the guest's program for many connections.
func weConnectMany(h *cmHost, fam family) {
	t := h.t
	t.Helper()
	p := ucmatose(h, "-b", addr(fam.guest))
	h.listening(p)
	ends := ucmatoseEnds(h)
	var handles []cm.Handle
	for i := range ends {
		handles = append(handles, cm.Handle(i+1))
		h.request(handles[i], ends[i], ucmatosePort)
	}
	h.established(len(ends), func(a cm.Action) bool {
		r, ok := a.(cm.ReplyReceived)
		if ok {
			h.rts(ends[r.Handle-1], r.Params)
			h.cm.Do(cm.Ready{Handle: r.Handle})
		}
		return ok
	})
	for _, e := range ends {
		e.receiveMany()
	}
	for _, e := range ends {
		e.sendMany()
	}
	h.disconnectAll(handles)
	if out, err := p.Wait(patience); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestPeerKernelDies takes the power from a guest in the middle of a connection:
// our sends fail, and the kernel that comes up in its place neither disturbs us
// nor keeps us from connecting again.
func TestPeerKernelDies(t *testing.T) {
	shared := open(t, 1500) // or skip
	w, err := newWorld(shared.img, 1500, "dies")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.close)
	fam := w.families(t)[0]
	h := newCMHost(t, w, fam)
	serve := func() {
		h.listening(h.start("rping", "-s", "-a", addr(fam.guest), "-p", fmt.Sprint(rpingPort), "-S", fmt.Sprint(rpingSize)))
	}
	serve()
	e := h.end(rpingBuf)
	e.postRecv(1, atRecv, rpingInfo)
	h.connect(1, e, rpingPort)
	h.beClient(e, 0)
	w.vm.Kill()
	e.send(1, atSend, rpingInfo)
	if wc := e.next(e.sendCQ, "send to a dead peer"); wc.Status != verbs.RetryExceeded {
		t.Errorf("send to a dead peer: %+v, want %v", wc, verbs.RetryExceeded)
	}
	if s := e.qp.State(); s != verbs.StateError {
		t.Errorf("QP is in %v, want %v", s, verbs.StateError)
	}
	if wc := e.next(e.recvCQ, "receive"); wc.Status != verbs.WRFlushError {
		t.Errorf("receive: %+v, want %v", wc, verbs.WRFlushError)
	}
	if err := w.boot(); err != nil {
		t.Fatal(err)
	}
	// Our DREQ is for a connection that this kernel does not know: DREP all the same.
	h.cm.Do(cm.Disconnect{Handle: 1})
	h.ended(1, cm.ByUser)
	serve()
	e = newEnd(t, h.dev, endConfig{transport: ib.RC, buf: rpingBuf})
	e.postRecv(1, atRecv, rpingInfo)
	h.connect(2, e, rpingPort)
	h.beClient(e, 1)
	h.cm.Do(cm.Disconnect{Handle: 2})
	h.ended(2, cm.ByUser)
}
