package interop

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/long"
	"ipoibcm/provider/softroce"
	"ipoibcm/verbs"
)

// The ping-pong programs of rdma-core tell each other over TCP where to send:
// "LID:QPN:PSN:GID" in hexadecimal and a zero octet. The client speaks first,
// the server answers when its queue pair can receive, and the client says "done".
// Both then use one buffer for everything: what a server receives it sends back.

const pingpongPort = 18515

// A pingpong is one run of such a program in the guest.
type pingpong struct {
	program   string
	transport ib.Transport
	size      int
	guestIs   string // "server" or "client"
	qps       int    // ibv_srq_pingpong
}

const iterations = 3

// pingpongQKey is the Q_Key that ibv_ud_pingpong uses.
const pingpongQKey ib.QKey = 0x11111111

// srqDestinations is how many lines ibv_srq_pingpong exchanges, whatever -q says.
const srqDestinations = 256

// A destination is one line of the side channel.
type destination struct {
	qpn ib.QPN
	psn ib.PSN
	gid ib.GID
}

func (d destination) append(b []byte) []byte {
	return fmt.Appendf(b, "%04x:%06x:%06x:%x\x00", 0, uint32(d.qpn), uint32(d.psn), d.gid[:])
}

// destinationLen is the length of a line, the zero octet included.
const destinationLen = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1

func readDestination(r io.Reader) (d destination, err error) {
	var b [destinationLen]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return d, err
	}
	var lid uint16
	var g string
	if _, err := fmt.Sscanf(string(b[:destinationLen-1]), "%x:%x:%x:%s", &lid, &d.qpn, &d.psn, &g); err != nil {
		return d, fmt.Errorf("side channel: %q: %w", b, err)
	}
	raw, err := hex.DecodeString(g)
	if err != nil || len(raw) != len(d.gid) {
		return d, fmt.Errorf("side channel: GID in %q", b)
	}
	copy(d.gid[:], raw)
	return d, nil
}

// exchange tells the program of ours and returns its own. ready is called when
// the program's are known and before it may send.
func (p pingpong) exchange(w *world, run func() error, ours []destination, ready func([]destination)) error {
	var line []byte
	for _, d := range ours {
		line = d.append(line)
	}
	if p.guestIs == "server" {
		if err := run(); err != nil {
			return err
		}
		conn, err := dialPingpong(w)
		if err != nil {
			return err
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(patience))
		if _, err := conn.Write(line); err != nil {
			return err
		}
		theirs, err := readDestinations(conn, len(ours))
		if err != nil {
			return err
		}
		ready(theirs)
		_, err = conn.Write([]byte("done\x00"))
		return err
	}
	var ln net.Listener
	if err := w.host.Do(func() (err error) {
		ln, err = net.Listen("tcp4", fmt.Sprintf("%s:%d", hostIPv4, pingpongPort))
		return err
	}); err != nil {
		return err
	}
	defer ln.Close()
	ln.(*net.TCPListener).SetDeadline(time.Now().Add(patience))
	if err := run(); err != nil {
		return err
	}
	conn, err := ln.Accept()
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	theirs, err := readDestinations(conn, len(ours))
	if err != nil {
		return err
	}
	ready(theirs)
	if _, err := conn.Write(line); err != nil {
		return err
	}
	done := make([]byte, 5)
	if _, err := io.ReadFull(conn, done); err != nil || string(done) != "done\x00" {
		return errors.Join(err, fmt.Errorf("side channel: %q instead of done", done))
	}
	return nil
}

// dialPingpong connects to the guest's program, which may not listen yet.
func dialPingpong(w *world) (conn net.Conn, err error) {
	err = w.host.Do(func() (err error) {
		for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) { // it is not listening yet
			conn, err = net.DialTimeout("tcp4", fmt.Sprintf("%s:%d", guestIPv4, pingpongPort), patience)
			if err == nil || time.Now().After(end) {
				return err
			}
		}
	})
	return conn, err
}

func readDestinations(conn net.Conn, n int) (theirs []destination, err error) {
	theirs = make([]destination, n)
	for i := range theirs {
		if theirs[i], err = readDestination(conn); err != nil {
			return nil, err
		}
	}
	return theirs, nil
}

// fromGuest checks the GRH of a datagram that came from the guest into buf.
func fromGuest(t *testing.T, fam family, wc verbs.WC, buf []byte) {
	t.Helper()
	src, dst := verbs.GRHAddrs(buf, fam.host.Is4())
	expect.Equal(t, src, fam.guest, "source GID")
	expect.Equal(t, dst, fam.host, "destination GID")
	expect.Equal(t, wc.Flags&verbs.WithGRH, verbs.WithGRH, "flag of a GRH")
}

// run plays one ping-pong and compares all data.
func (p pingpong) run(t *testing.T, w *world, d *softroce.Device, fam family) {
	t.Helper()
	grh := 0
	if p.transport == ib.UD {
		grh = verbs.GRHLen
	}
	slot := p.size + verbs.GRHLen
	qps := max(1, p.qps)
	var srq verbs.SRQ
	var recvCQ verbs.CQ
	if p.qps > 0 {
		var err error
		if srq, err = d.CreateSRQ(verbs.SRQInit{Depth: 64, MaxSGE: 1}); err != nil {
			t.Fatal(err)
		}
		if recvCQ, err = d.CreateCQ(64); err != nil {
			t.Fatal(err)
		}
	}
	ends := make([]*end, qps)
	ours := make([]destination, qps)
	byQPN := map[ib.QPN]*end{}
	for i := range ends {
		e := newEnd(t, d, endConfig{transport: p.transport, srq: srq, recvCQ: recvCQ, buf: 8 * slot, qkey: pingpongQKey})
		ends[i], byQPN[e.qp.QPN()] = e, e
		ours[i] = destination{e.qp.QPN(), startPSN, fam.host}
		if p.qps == 0 || i == 0 {
			for id := range uint64(6) {
				e.postRecv(id, int(id)*slot, p.size+grh)
			}
		}
	}
	for p.qps > 0 && len(ours) < srqDestinations {
		ours = append(ours, destination{gid: fam.host})
	}
	argv := []string{p.program, "-g", fmt.Sprint(fam.index), "-s", fmt.Sprint(p.size), "-n",
		fmt.Sprint(iterations * qps), "-p", fmt.Sprint(pingpongPort), "-r", "64"}
	if p.transport != ib.UD {
		argv = append(argv, "-m", fmt.Sprint(pathMTU(w.mtu).Octets()))
	}
	if p.qps > 0 {
		argv = append(argv, "-q", fmt.Sprint(p.qps))
	}
	if p.guestIs == "client" {
		argv = append(argv, hostIPv4)
	}
	var theirs []destination
	var ah verbs.AH
	proc, err := w.vm.Start("true")
	if err != nil {
		t.Fatal(err)
	}
	start := func() error {
		proc, err = w.vm.Start(argv...)
		return err
	}
	defer func() {
		if t.Failed() {
			w.explain(t, d, proc)
		}
	}()
	path := verbs.AHAttr{SGID: fam.host, DGID: fam.guest}
	err = p.exchange(w, start, ours, func(got []destination) {
		theirs = got
		for i, e := range ends {
			e.connect(path, pathMTU(w.mtu), got[i].qpn, got[i].psn)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if p.transport == ib.UD {
		if ah, err = d.CreateAH(path); err != nil {
			t.Fatal(err)
		}
		defer ah.Destroy()
	}
	if theirs[0].gid != fam.guest {
		t.Errorf("the program's GID is %v, want %v", theirs[0].gid, fam.guest)
	}
	out := 6 * slot // where messages are sent from
	ping := func(i int, seed uint32) {
		t.Helper()
		e := ends[i]
		copy(e.mem.Buf[out:], pattern(p.size, seed))
		wr := verbs.SendWR{ID: uint64(seed), Opcode: verbs.Send, SG: e.sg(out, p.size)}
		if p.transport == ib.UD {
			wr.AH, wr.RemoteQPN, wr.RemoteQKey = ah, theirs[i].qpn, pingpongQKey
		}
		e.postSend(wr)
		if wc := e.sent(); wc.ID != uint64(seed) {
			t.Fatalf("completion of another send: %+v", wc)
		}
	}
	// pong takes a message in and returns from which queue pair.
	pong := func(want []byte) int {
		t.Helper()
		wc := ends[0].received()
		e := byQPN[wc.QPN]
		if e == nil {
			t.Fatalf("received on %v, which is none of our queue pairs", wc.QPN)
		}
		expect.MustEqual(t, wc.ByteLen, p.size+grh, "octets received")
		expect.MustEqual(t, wc.Opcode, verbs.Recv, "opcode of what was received")
		owner := e
		if p.qps > 0 {
			owner = ends[0] // the buffers of the SRQ are of its region
		}
		off := int(wc.ID) * slot
		got := owner.mem.Buf[off : off+wc.ByteLen]
		if p.transport == ib.UD {
			fromGuest(t, fam, wc, got)
			expect.Equal(t, wc.SrcQPN, theirs[0].qpn, "source QPN")
		}
		same(t, "data", got[grh:], want)
		owner.postRecv(wc.ID, off, p.size+grh)
		for i := range ends {
			if ends[i] == e {
				return i
			}
		}
		return -1
	}
	if p.guestIs == "server" {
		// One message at a time, because all its queue pairs share one buffer.
		for n := range iterations * qps {
			i := n % qps
			ping(i, uint32(n+1))
			if got := pong(pattern(p.size, uint32(n+1))); got != i {
				t.Fatalf("queue pair %d got the answer to queue pair %d", got, i)
			}
		}
	} else {
		// A client begins on all its queue pairs, with a buffer full of 0x7b, or
		// of zeros with an SRQ.
		first := []byte(strings.Repeat("\x7b", p.size))
		if p.qps > 0 {
			clear(first)
		}
		var turn []int
		for range qps {
			turn = append(turn, pong(first))
		}
		total := iterations * qps
		for n := range total {
			i := turn[n%qps]
			ping(i, uint32(n+1))
			if n+qps < total {
				if got := pong(pattern(p.size, uint32(n+1))); got != i {
					t.Fatalf("queue pair %d got the answer to queue pair %d", got, i)
				}
			}
		}
	}
	text, err := proc.Wait(patience)
	if err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("QPN 0x%06x, PSN 0x%06x", uint32(ours[0].qpn),
		uint32(startPSN)); !strings.Contains(text, want) {
		t.Errorf("the program has not understood our line %q:\n%s", want, text)
	}
	for _, e := range ends {
		if err := e.qp.Destroy(); err != nil {
			t.Error(err)
		}
		e.dev.Deregister(e.mem)
	}
}

// TestPingPong plays with ibv_{rc,uc,ud,srq}_pingpong, each as server and as client.
func TestPingPong(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world, fam family) {
		w.watch(t)
		d := w.device(t, softroce.Options{MaxUDPayload: pathMTU(w.mtu).Octets()})
		mtu := pathMTU(w.mtu).Octets()
		var runs []pingpong
		for _, role := range []string{"server", "client"} {
			for _, size := range []int{1, 3, mtu, mtu + 1, 65536, 1 << 20} {
				runs = append(runs, pingpong{"ibv_rc_pingpong", ib.RC, size, role, 0})
				// Nothing slows a UC message of a thousand packets down, and the program waits for ever
				// for what a guest on a busy machine has lost.
				if size <= long.Of(65536, 1<<20) {
					runs = append(runs, pingpong{"ibv_uc_pingpong", ib.UC, size, role, 0})
				}
			}
			for _, size := range []int{1, 2, mtu / 2, mtu} {
				runs = append(runs, pingpong{"ibv_ud_pingpong", ib.UD, size, role, 0})
			}
			for _, size := range []int{1, mtu + 1, 65536} {
				runs = append(runs, pingpong{"ibv_srq_pingpong", ib.RC, size, role, 4})
			}
		}
		for _, p := range runs {
			t.Run(fmt.Sprintf("%s/%d/guest=%s", strings.TrimSuffix(strings.TrimPrefix(p.program, "ibv_"), "_pingpong"), p.size,
				p.guestIs), func(t *testing.T) {
				p.run(t, w, d, fam)
			})
			if t.Failed() {
				return
			}
		}
		for _, name := range []string{"rx_drop_icrc", "rx_drop_malformed"} {
			if n := counter(t, d, name); n != 0 {
				t.Errorf("%s is %d", name, n)
			}
		}
		// rxe sends IPv4 identifications that a UDP socket hides.
		if n := counter(t, d, "rx_foreign_id"); (n > 0) != fam.host.Is4() {
			t.Errorf("%d packets with an identification that is not ours, GIDs are %s", n, fam.name)
		}
	})
}
