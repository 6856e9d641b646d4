package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/group"
	"ipoibcm/ib"
	"ipoibcm/provider/softroce"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// farmCommand is the first argument that makes the program run as a farm.
const farmCommand = "farm"

// A farm is one process that plays many peers over one provider. Each peer has a UD QP
// and an IPv4 address of its own, answers ARP, and accepts connections. Several peers
// share a GID, as interfaces of one adapter do. A farm discards what it receives on
// connections.
type farm struct {
	dev   *softroce.Device
	gids  []ib.GID
	peers []*farmPeer
	byQPN map[ib.QPN]int // UD
	ahs   map[[2]ib.GID]verbs.AH

	udCQ, rcCQ verbs.CQ
	srq        verbs.SRQ
	recv, send *verbs.Region // of UD
	sent       int
	rcRecv     *verbs.Region

	conns    map[mad.CommID]*farmConn // by our ID
	byRemote map[farmKey]*farmConn
	byConn   map[ib.QPN]*farmConn
	lastComm mad.CommID
}

type farmPeer struct {
	qp  verbs.QP
	gid ib.GID
}

// A farmKey identifies a connection by the GID and the communication ID of the other side.
type farmKey struct {
	gid  ib.GID
	comm mad.CommID
}

type farmConn struct {
	peer int
	key  farmKey
	qp   verbs.QP
	rep  mad.REP
	up   bool
}

const (
	farmFirst   = 64             // receives of the first UD QP, which hears the broadcast group
	farmRecvs   = 2              // of each other
	farmBuf     = 40 + 4096      // octets of a UD receive
	farmSends   = 8192           // UD sends that may be on their way
	farmSendBuf = 64             // octets of one
	farmMessage = 65524          // Receive MTU
	farmShared  = 32             // receives of all connections together
	farmTimeout = ib.Timeout(14) // 67 ms
)

// farmIP is the address of peer i.
func farmIP(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 99, byte(1 + i/250), byte(1 + i%250)})
}

// farmIndex returns the index of the peer with an address. ok is false if a is no such address.
func farmIndex(a netip.Addr) (i int, ok bool) {
	if !a.Is4() {
		return 0, false
	}
	b := a.As4()
	if b[0] != 10 || b[1] != 99 || b[2] < 1 || b[3] < 1 || b[3] > 250 {
		return 0, false
	}
	return int(b[2]-1)*250 + int(b[3]-1), true
}

// runFarm serves until in ends. It prints "ready", and when a connection is
// established "up INDEX NANOSECONDS": the peer, and the time of the monotonic clock.
func runFarm(args []string, in io.Reader, out io.Writer) error {
	flags := flag.NewFlagSet(farmCommand, flag.ContinueOnError)
	n := flags.Int("peers", 1, "peers")
	prefix := flags.String("gids", "", "prefix of the addresses to use as GIDs")
	if err := flags.Parse(args); err != nil {
		return err
	}
	p, err := netip.ParsePrefix(*prefix)
	if err != nil {
		return err
	}
	f, err := newFarm(*n, p)
	if err != nil {
		return fmt.Errorf("farm: %w", err)
	}
	defer f.dev.Close()
	frames := make(chan *farmFrame, 1024)
	go f.receive(frames)
	data := make(chan ib.QPN, 1024)
	go f.discard(data)
	ended := make(chan struct{})
	go func() {
		io.Copy(io.Discard, in)
		close(ended)
	}()
	w := bufio.NewWriter(out)
	fmt.Fprintln(w, "ready")
	w.Flush()
	mads := f.dev.MADPort().MADs()
	for {
		select {
		case <-ended:
			return nil
		case fr := <-frames:
			f.frame(fr)
		case m := <-mads:
			if c := f.mad(m); c != nil {
				fmt.Fprintln(w, "up", c.peer, monotonic())
			}
		case qpn := <-data:
			if c := f.carries(qpn); c != nil {
				fmt.Fprintln(w, "up", c.peer, monotonic())
			}
		}
		if len(mads) == 0 {
			w.Flush()
		}
	}
}

// monotonic reads the clock that all processes of a machine share.
func monotonic() int64 {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return ts.Nano()
}

func newFarm(n int, gids netip.Prefix) (f *farm, err error) {
	dev, err := softroce.Open(softroce.Options{Underlay: "eth0", NoLimits: true,
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))})
	if err != nil {
		return nil, err
	}
	f = &farm{dev: dev, byQPN: map[ib.QPN]int{}, ahs: map[[2]ib.GID]verbs.AH{}, conns: map[mad.CommID]*farmConn{},
		byRemote: map[farmKey]*farmConn{}, byConn: map[ib.QPN]*farmConn{}}
	for _, g := range dev.Port().GIDs {
		if gids.Contains(g.Addr()) {
			f.gids = append(f.gids, g)
		}
	}
	if len(f.gids) == 0 {
		return nil, errors.Join(fmt.Errorf("eth0 has no address of %v", gids), dev.Close())
	}
	if err := f.makeQueues(n); err != nil {
		return nil, errors.Join(err, dev.Close())
	}
	for i := range n {
		if err := f.addPeer(i); err != nil {
			return nil, errors.Join(err, dev.Close())
		}
	}
	return f, f.peers[0].qp.AttachMulticast(group.BroadcastGID(ib.DefaultPKey, 2))
}

func (f *farm) makeQueues(n int) (err error) {
	for _, cq := range []*verbs.CQ{&f.udCQ, &f.rcCQ} {
		if *cq, err = f.dev.CreateCQ(1 << 14); err != nil {
			return err
		}
	}
	if f.recv, err = f.dev.Alloc((farmFirst + n*farmRecvs) * farmBuf); err != nil {
		return err
	}
	if f.send, err = f.dev.Alloc(farmSends * farmSendBuf); err != nil {
		return err
	}
	if f.rcRecv, err = f.dev.Alloc(farmShared * farmMessage); err != nil {
		return err
	}
	if f.srq, err = f.dev.CreateSRQ(verbs.SRQInit{Depth: farmShared, MaxSGE: 1}); err != nil {
		return err
	}
	for i := range farmShared {
		if err := f.postShared(uint64(i)); err != nil {
			return err
		}
	}
	return nil
}

func (f *farm) postShared(i uint64) error {
	b := f.rcRecv.Buf[i*farmMessage:][:farmMessage]
	_, err := f.srq.PostRecv([]verbs.RecvWR{{ID: i, SG: []verbs.SGE{{Region: f.rcRecv, Buf: b}}}})
	return err
}

func (f *farm) addPeer(i int) error {
	recvs, first := farmRecvs, farmFirst+i*farmRecvs
	if i == 0 {
		recvs, first = farmFirst, 0
	}
	qp, err := f.dev.CreateQP(verbs.QPInit{Transport: ib.UD, SendCQ: f.udCQ, RecvCQ: f.udCQ, SendDepth: 64,
		RecvDepth: recvs, MaxSendSGE: 1, MaxRecvSGE: 1})
	if err != nil {
		return err
	}
	for _, s := range []verbs.QPState{verbs.StateInit, verbs.StateRTR, verbs.StateRTS} {
		if err := qp.Modify(verbs.QPAttr{State: s, PKey: ib.DefaultPKey, QKey: ib.QKeyIPoIB}); err != nil {
			return err
		}
	}
	f.byQPN[qp.QPN()] = i
	f.peers = append(f.peers, &farmPeer{qp: qp, gid: f.gids[i%len(f.gids)]})
	for k := range recvs {
		if err := f.post(qp, uint64(first+k)); err != nil {
			return err
		}
	}
	return nil
}

// post gives a UD receive buffer to qp.
func (f *farm) post(qp verbs.QP, i uint64) error {
	b := f.recv.Buf[i*farmBuf:][:farmBuf]
	_, err := qp.PostRecv([]verbs.RecvWR{{ID: i, SG: []verbs.SGE{{Region: f.recv, Buf: b}}}})
	return err
}

// A farmFrame is a message that the UD QP of a peer received, the 4-octet header included.
type farmFrame struct {
	peer int
	data []byte
}

// receive passes copies of the messages on UD QPs to frames, until the provider is closed.
func (f *farm) receive(frames chan<- *farmFrame) {
	eachWC(f.udCQ, func(wc *verbs.WC) {
		i, known := f.byQPN[wc.QPN]
		if wc.Opcode != verbs.Recv || wc.Status != verbs.Success || !known {
			return
		}
		data := append([]byte(nil), f.recv.Buf[wc.ID*farmBuf:][verbs.GRHLen:wc.ByteLen]...)
		_ = f.post(f.peers[i].qp, wc.ID)
		select {
		case frames <- &farmFrame{i, data}:
		default: // the asking side sends the request again
		}
	})
}

// eachWC passes completions to f, until the provider is closed.
func eachWC(cq verbs.CQ, f func(*verbs.WC)) {
	var wcs [64]verbs.WC
	for {
		n := cq.Poll(wcs[:])
		if n == 0 && cq.Wait() != nil {
			return
		}
		for i := range wcs[:n] {
			f(&wcs[i])
		}
	}
}

// discard posts each used receive buffer of a connection again, and sends the connection's QPN to data.
func (f *farm) discard(data chan<- ib.QPN) {
	eachWC(f.rcCQ, func(wc *verbs.WC) {
		if wc.Opcode == verbs.Recv {
			_ = f.postShared(wc.ID)
			select {
			case data <- wc.QPN:
			default: // more will come
			}
		}
	})
}

// frame answers an ARP request, whether it came by multicast or to the peer itself.
func (f *farm) frame(fr *farmFrame) {
	var h encap.Header
	var p arp.Packet
	if h.UnmarshalBinary(fr.data) != nil || h.Type != encap.ARP ||
		p.UnmarshalBinary(fr.data[encap.HeaderLen:]) != nil || p.Op != arp.Request {
		return
	}
	i, ok := farmIndex(p.TargetIP)
	if !ok || i >= len(f.peers) {
		return
	}
	own := f.peers[i]
	ah, err := f.ah(own.gid, p.Sender.GID)
	if err != nil {
		return
	}
	buf := f.send.Buf[f.sent%farmSends*farmSendBuf:][:0:farmSendBuf]
	f.sent++
	buf, _ = h.AppendBinary(buf)
	if buf, err = p.ReplyFrom(encap.LinkAddr{Flags: encap.FlagRC, QPN: own.qp.QPN(), GID: own.gid}).
		AppendBinary(buf); err != nil {
		return
	}
	_, _ = own.qp.PostSend([]verbs.SendWR{{Opcode: verbs.Send, Flags: verbs.Signaled,
		SG: []verbs.SGE{{Region: f.send, Buf: buf}}, AH: ah, RemoteQPN: p.Sender.QPN, RemoteQKey: ib.QKeyIPoIB}})
}

func (f *farm) ah(from, to ib.GID) (verbs.AH, error) {
	key := [2]ib.GID{from, to}
	if ah := f.ahs[key]; ah != nil {
		return ah, nil
	}
	ah, err := f.dev.CreateAH(verbs.AHAttr{SGID: from, DGID: to})
	if err == nil {
		f.ahs[key] = ah
	}
	return ah, err
}

// mad answers a CM message. If that is the RTU that establishes a connection, mad returns the
// connection, otherwise nil.
func (f *farm) mad(m *verbs.MAD) (established *farmConn) {
	_, msg, err := mad.Parse(m.Data[:])
	if err != nil {
		return nil
	}
	switch msg := msg.(type) {
	case mad.REQ:
		if c := f.accept(m, msg); c != nil {
			f.reply(m, c.rep)
		}
	case mad.RTU:
		return f.conns[msg.RemoteCommID].rise()
	case mad.DREQ:
		if c := f.conns[msg.RemoteCommID]; c != nil {
			_ = c.qp.Destroy()
			delete(f.conns, msg.RemoteCommID)
			delete(f.byRemote, c.key)
			delete(f.byConn, c.qp.QPN())
		}
		f.reply(m, mad.DREP{TransactionID: msg.TransactionID, LocalCommID: msg.RemoteCommID, RemoteCommID: msg.LocalCommID})
	}
	return nil
}

// carries establishes the connection of the QP qpn, which has received data before the RTU,
// and returns the connection. It returns nil if the QP has no connection, or one that is
// already established.
func (f *farm) carries(qpn ib.QPN) *farmConn { return f.byConn[qpn].rise() }

// rise notes that c is established, and returns c. It returns nil if c is nil or was established before.
func (c *farmConn) rise() *farmConn {
	if c == nil || c.up {
		return nil
	}
	c.up = true
	return c
}

// accept makes the connection that a REQ asks for and returns it. For a repeated REQ it returns
// the same connection again. It returns nil if the REQ is not for RC or not to a peer of the
// farm, or if the QP cannot be made.
func (f *farm) accept(m *verbs.MAD, req mad.REQ) *farmConn {
	key := farmKey{m.Remote, req.LocalCommID}
	if c := f.byRemote[key]; c != nil {
		return c
	}
	_, qpn := serviceid.Parse(req.ServiceID)
	i, known := f.byQPN[qpn]
	if !known || req.Transport != ib.RC {
		return nil
	}
	qp, err := f.dev.CreateQP(verbs.QPInit{Transport: ib.RC, SendCQ: f.rcCQ, RecvCQ: f.rcCQ, SRQ: f.srq,
		SendDepth: 1, MaxSendSGE: 1, MaxRecvSGE: 1})
	if err != nil {
		return nil
	}
	psn := ib.PSN(time.Now().UnixNano()) & ib.PSNMask
	for _, attr := range []verbs.QPAttr{
		{State: verbs.StateInit, PKey: ib.DefaultPKey},
		{State: verbs.StateRTR, Path: verbs.AHAttr{SGID: m.Local, DGID: m.Remote},
			PathMTU: min(req.PathMTU, f.dev.Port().MTU),
			DestQPN: req.LocalQPN, RQPSN: psn, MinRNRTimer: 12},
		{State: verbs.StateRTS, SQPSN: req.StartingPSN, Timeout: farmTimeout, RetryCount: 7, RNRRetry: 7},
	} {
		if qp.Modify(attr) != nil {
			_ = qp.Destroy()
			return nil
		}
	}
	f.lastComm++
	c := &farmConn{peer: i, key: key, qp: qp, rep: mad.REP{TransactionID: req.TransactionID,
		LocalCommID: f.lastComm, RemoteCommID: req.LocalCommID, LocalQPN: qp.QPN(), StartingPSN: psn,
		RNRRetryCount: 7, SRQ: true, LocalCAGUID: f.dev.Port().GUID}}
	pd, _ := encap.PrivateData{QPN: qpn, ReceiveMTU: farmMessage}.AppendBinary(nil)
	copy(c.rep.PrivateData[:], pd)
	f.conns[f.lastComm], f.byRemote[key], f.byConn[qp.QPN()] = c, c, c
	return c
}

func (f *farm) reply(to *verbs.MAD, msg interface {
	AppendBinary([]byte) ([]byte, error)
}) {
	m := &verbs.MAD{Remote: to.Remote, Local: to.Local, QPN: to.QPN}
	if _, err := msg.AppendBinary(m.Data[:0]); err == nil {
		_ = f.dev.MADPort().SendMAD(m)
	}
}
