package interop

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/mpa"
	"ipoibcm/provider/softiwarp"
	"ipoibcm/test/interop/judge"
	"ipoibcm/test/interop/vm"
	"ipoibcm/wire/mad"
)

// This file meets the kernel's NFS server over RPC-over-RDMA.

// nfsPort is where it listens (RFC 8166 section 9).
const nfsPort = 20049

// nfsd starts it. Nobody in the guest answers the kernel's questions about clients
// and exports, so the answers are in its caches beforehand: who the clients are,
// that the root of NFSv4 is /export, and that it may be read (flags: fsid, no
// subtree check, insecure port, read-only). The listener is asked for exactly
// once: a second time makes this kernel stumble. Without the folder for its
// recovery the server could not be told to end its period of grace.
const nfsd = `set -e
modprobe rpcrdma
modprobe nfsd
mount -t nfsd nfsd /proc/fs/nfsd
mkdir -p /export /var/lib/nfs/v4recovery
mount -t tmpfs -o size=16m tmpfs /export
seq 100000 999999 | head -c 300000 >/export/numbers
for c in %s; do echo "nfsd $c 2147483647 clients" >/proc/net/rpc/auth.unix.ip/channel; done
echo 'clients 1 \x00000000 2147483647 /export' >/proc/net/rpc/nfsd.fh/channel
echo 'clients /export 2147483647 9221 65534 65534 0' >/proc/net/rpc/nfsd.export/channel
echo '-2 -3 +4 +4.1 +4.2' >/proc/fs/nfsd/versions
echo 'rdma %d' >/proc/fs/nfsd/portlist
echo 2 >/proc/fs/nfsd/threads
echo Y >/proc/fs/nfsd/v4_end_grace
cat /proc/fs/nfsd/versions /proc/fs/nfsd/portlist
`

var nfs struct {
	sync.Mutex
	w   *world
	siw error // why the guest has no siw0
	err error
}

// openNFS returns a world whose guest runs the server over rxe0, and over siw0
// where siw can be built.
func openNFS(t *testing.T) *world {
	t.Helper()
	open(t, 1500) // skips if guests cannot be had
	nfs.Lock()
	defer nfs.Unlock()
	if nfs.w == nil && nfs.err == nil {
		nfs.w, nfs.err = newNFSWorld(t)
		if nfs.w != nil {
			worlds.Lock()
			worlds.byMTU[-2] = nfs.w // closed with the others
			worlds.Unlock()
		}
	}
	if nfs.err != nil {
		t.Fatal(nfs.err)
	}
	return nfs.w
}

func newNFSWorld(t *testing.T) (*world, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute)
	defer cancel()
	img, err := vm.WithSIW(ctx, worlds.image)
	if err != nil {
		var missing *vm.MissingError
		if !errors.As(err, &missing) {
			return nil, err
		}
		img, nfs.siw = worlds.image, err
	}
	start := time.Now()
	w, err := newWorld(img, 1500, "nfs")
	if err != nil {
		return nil, err
	}
	booted := time.Now()
	if nfs.siw == nil {
		if _, err := w.vm.Sh(patience, "insmod /lib/siw/libcrc32c.ko*"); err != nil {
			return w, err
		}
		w.load(t, "siw")
	}
	ll, err := w.host.LinkLocal("eth0")
	if err != nil {
		return w, err
	}
	out, err := w.vm.Sh(patience, fmt.Sprintf(nfsd, hostIPv4+" "+ll.String(), nfsPort))
	if err != nil {
		return w, fmt.Errorf("%w\n%s", err, w.vm.Console())
	}
	t.Logf("the guest took %v, the server %v: %s", booted.Sub(start), time.Since(booted),
		strings.Join(strings.Fields(out), " "))
	return w, nil
}

// Where an nfsConn keeps what.
const (
	nfsInline = 4096 // our size of messages, both ways
	nfsRecvs  = 4
	nfsSend   = 0
	nfsRecv   = nfsInline
	nfsBuf    = nfsRecv + nfsRecvs*nfsInline
)

// An nfsConn is our end of a connection to the server.
type nfsConn struct {
	*end
	cap *vm.Capture
	bye func() // ends the connection
}

// receives posts what messages come into, before there is a connection.
func (c *nfsConn) receives() {
	for id := range nfsRecvs {
		c.postRecv(uint64(id), nfsRecv+id*nfsInline, nfsInline)
	}
}

// say sends a message.
func (c *nfsConn) say(msg []byte) {
	c.t.Helper()
	copy(c.mem.Buf[nfsSend:], msg)
	c.send(100, nfsSend, len(msg))
	c.sent()
}

// hear returns the next message that comes.
func (c *nfsConn) hear() []byte {
	c.t.Helper()
	wc := c.received()
	at := nfsRecv + int(wc.ID)*nfsInline
	msg := bytes.Clone(c.mem.Buf[at : at+wc.ByteLen])
	c.postRecv(wc.ID, at, nfsInline)
	return msg
}

// ask sends a message and compares the answer; the credits that the server grants
// in it are its own choice, but never none.
func (c *nfsConn) ask(what string, msg, want []byte) {
	c.t.Helper()
	c.say(msg)
	got := c.hear()
	if len(got) < 16 {
		c.t.Fatalf("%s: %x", what, got)
	}
	credits := binary.BigEndian.Uint32(got[8:])
	if credits == 0 {
		c.t.Errorf("%s: no credits: %x", what, got)
	}
	c.t.Logf("%s: %d credits, %x", what, credits, got)
	binary.BigEndian.PutUint32(want[8:], credits)
	same(c.t, what, got, want)
}

// overRoCE connects our CM and softroce to the server. The private data it
// answers with must be its own, and nothing behind.
func overRoCE(t *testing.T, w *world, fam family, private ...byte) *nfsConn {
	t.Helper()
	h := newCMHost(t, w, fam)
	c := &nfsConn{end: h.end(nfsBuf), cap: h.cap}
	c.receives()
	theirs := h.connect(1, c.end, nfsPort, private...)
	same(t, "private data of the REP", theirs, append(rfc8797(0, 3, 3), make([]byte, len(theirs)-8)...))
	c.bye = func() {
		t.Helper()
		h.cm.Do(cm.Disconnect{Handle: 1})
		h.ended(1, cm.ByUser)
		if len(h.cmPackets(true, mad.AttrDREP)) != 1 {
			t.Error("the kernel has not answered our DREQ")
		}
	}
	return c
}

// overIWARP does the same with softiwarp.
func overIWARP(t *testing.T, w *world, private ...byte) *nfsConn {
	t.Helper()
	w.judgeIWARP(t)
	d, e := w.iwarp(t)
	c := &nfsConn{end: e, cap: w.seg.Capture()}
	c.receives()
	var x exchange
	res, err := d.Connect(context.Background(), e.qp, softiwarp.Startup{
		Options: mpa.Options{Negotiate: true, Depths: depths}, Private: private, Trace: x.trace,
	}, w.dial(nfsPort))
	if err != nil {
		t.Fatal(err)
	}
	same(t, "private data of the MPA reply", res.Private, rfc8797(0, 3, 3))
	time.Sleep(breath)
	c.bye = func() {
		t.Helper()
		if err := e.qp.Destroy(); err != nil {
			t.Error(err)
		}
		noFaults(t, d)
	}
	return c
}

// TestNFSServer: we connect to the kernel's NFS server with private data of RFC
// 8797 and without, which it answers alike: 4096 octets both ways, and no remote
// invalidation of its own STags.
func TestNFSServer(t *testing.T) {
	w := openNFS(t)
	for _, private := range []struct {
		name string
		data []byte
	}{
		{"with remote invalidation", rfc8797(1, 3, 3)},
		{"without private data", nil},
	} {
		for _, fam := range w.families(t) {
			t.Run("RoCE/"+fam.name+"/"+private.name, func(t *testing.T) { speak(overRoCE(t, w, fam, private.data...)) })
		}
		t.Run("iWARP/"+private.name, func(t *testing.T) {
			if nfs.siw != nil {
				t.Skip(nfs.siw)
			}
			speak(overIWARP(t, w, private.data...))
		})
	}
}

// speak shows which versions and procedures the server takes.
func speak(c *nfsConn) {
	t := c.t
	t.Helper()
	null := func(xid uint32) {
		t.Helper()
		c.ask("NULL", append(rdmaHeader(xid, 1, askCredits, rdmaMSG), rpcCall(xid, procNULL)...),
			append(rdmaHeader(xid, 1, 0, rdmaMSG), rpcReply(xid)...))
	}
	const xid = 0x11223344
	// Offered version two first, it says that it has version one only (RFC 8166
	// section 4.5), and goes on.
	c.ask("version two", append(words(xid, 2, askCredits, rdmaMSG, 0, 0, 0, 0, 0), rpcCall(xid, procNULL)...),
		words(xid, 2, 0, rdmaERROR, errVERS, 1, 1))
	null(xid)
	for _, vers := range []uint32{0, 3, 0xffffffff} {
		c.ask(fmt.Sprintf("version %d", vers), rdmaHeader(xid, vers, askCredits, rdmaMSG),
			words(xid, vers, 0, rdmaERROR, errVERS, 1, 1))
	}
	c.ask("procedure 9", append(rdmaHeader(xid, 1, askCredits, 9), rpcCall(xid, procNULL)...),
		words(xid, 1, 0, rdmaERROR, errCHUNK))
	null(xid + 1)
	c.bye()
	// It knows version one only, and what belongs to it.
	c.dissected(
		"0x11223344 MSG NFS 4 call 0", "0x11223344 MSG NFS 4 reply 0 accepted 0",
		"0x11223344 ERROR 2",
		"0x11223345 MSG NFS 4 call 0", "0x11223345 MSG NFS 4 reply 0 accepted 0",
	)
}

// dissected ends the capture and compares the RPC-over-RDMA that tshark sees in it.
func (c *nfsConn) dissected(want ...string) {
	c.t.Helper()
	if got := nfsMessages(c.t, c.cap); got != nil && !slices.Equal(got, want) {
		c.t.Errorf("tshark sees\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// nfsMessages ends a capture and returns the RPC-over-RDMA that tshark sees in
// it; nil without tshark.
func nfsMessages(t *testing.T, wire *vm.Capture) (got []string) {
	t.Helper()
	packets, err := wire.Stop()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "rpc.pcap")
	if err := vm.WritePcap(file, packets); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	rows, err := judge.RPCFields(ctx, file, "rpcordma", "frame.number", "_ws.malformed", "_ws.expert.severity",
		"_ws.expert.message",
		"rpcordma.xid", "rpcordma.version", "rpcordma.msg_type", "rpcordma.errcode", "rpc.xid", "rpc.msgtyp", "rpc.program",
		"rpc.programversion", "rpc.procedure", "rpc.state_accept", "infiniband.bth.destqp", "infiniband.bth.psn")
	if errors.Is(err, judge.ErrNoTshark) {
		t.Log(err)
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, r := range rows {
		at := r[14] + " " + r[15]
		if r[15] != "" && seen[at] {
			continue // an ACK was late on a busy machine, and the packet was sent again
		}
		seen[at] = true
		if r[1] != "" {
			t.Errorf("tshark: packet %s is malformed: %s %s", r[0], r[1], r[3])
		}
		if strings.Contains(r[2], "8388608") && !judge.Known(r[3]) {
			t.Errorf("tshark: packet %s has an error: %s", r[0], r[3])
		}
		xid, proc, rpc := r[4], r[6], r[8:]
		kind := map[string]string{"0": "MSG", "1": "NOMSG", "4": "ERROR"}[proc]
		switch {
		case r[5] != "1":
			t.Errorf("tshark: packet %s is of version %s", r[0], r[5])
		case kind == "ERROR":
			got = append(got, fmt.Sprintf("%s %s %s", xid, kind, r[7]))
		case rpc[0] == "" && kind == "NOMSG": // all of it is in chunks
			got = append(got, fmt.Sprintf("%s %s", xid, kind))
		case rpc[0] != xid || rpc[2] != fmt.Sprint(nfsProgram):
			t.Errorf("tshark: packet %s: RPC %q inside of XID %s", r[0], rpc, xid)
		case rpc[1] == "0":
			got = append(got, fmt.Sprintf("%s %s NFS %s call %s", xid, kind, rpc[3][:1], rpc[4][:1]))
		default:
			got = append(got, fmt.Sprintf("%s %s NFS %s reply %s accepted %s", xid, kind, rpc[3][:1], rpc[4][:1], rpc[5]))
		}
	}
	return got
}
