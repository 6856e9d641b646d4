package interop

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/control"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/lab"
	"ipoibcm/serviceid"
	"ipoibcm/test/interop/judge"
	"ipoibcm/test/interop/vm"
	"ipoibcm/wire/mad"
)

// dissect has tshark print fields of the packets that filter lets through.
func dissect(t *testing.T, pcap, filter string, fields ...string) []map[string]string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	rows, err := judge.Fields(ctx, pcap, filter, fields...)
	if errors.Is(err, judge.ErrNoTshark) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	out := make([]map[string]string, len(rows))
	for i, r := range rows {
		out[i] = map[string]string{}
		for j, f := range fields {
			out[i][f] = r[j]
		}
	}
	return out
}

// hasFields compares what tshark says of the only packet that filter lets
// through with what was meant. Hexadecimal numbers may have leading zeros.
func hasFields(t *testing.T, pcap, filter string, want map[string]string) {
	t.Helper()
	var fields []string
	for f := range want {
		fields = append(fields, f)
	}
	rows := dissect(t, pcap, filter, fields...)
	if len(rows) != 1 {
		t.Errorf("%s: %d packets, want 1", filter, len(rows))
		return
	}
	for f, w := range want {
		if got := rows[0][f]; got != w {
			t.Errorf("%s: tshark reads %s = %q, we meant %q", filter, f, got, w)
		}
	}
}

func num(digits int, v any) string { return fmt.Sprintf("0x%0*x", digits, v) }

// TestTsharkReadsOurCM compares each CM message that we send to the kernel, as
// tshark reads it, with what we asked for. Its faults with flow label and packet
// rate are left out.
func TestTsharkReadsOurCM(t *testing.T) {
	w := open(t, 1500)
	for _, fam := range w.families(t) {
		t.Run(fam.name, func(t *testing.T) {
			h := newCMHost(t, w, fam)
			h.listening(h.start("rping", "-s", "-a", addr(fam.guest), "-p", fmt.Sprint(rpingPort), "-S", fmt.Sprint(rpingSize)))
			e := h.end(rpingBuf)
			e.postRecv(1, atRecv, rpingInfo)
			h.connect(1, e, rpingPort)
			h.beClient(e, 0)
			c := h.cm.Conns()[0]
			h.cm.Do(cm.Disconnect{Handle: 1})
			h.ended(1, cm.ByUser)
			h.cm.Do(cm.Listen{ServiceID: serviceid.RDMAIP(rpingPort)})
			p := h.start("rping", "-c", "-a", addr(fam.host), "-p", fmt.Sprint(rpingPort), "-C", "1")
			r := next[cm.RequestReceived](h)
			h.cm.Do(cm.Reject{Handle: r.Handle, Reason: cm.ReasonConsumer})
			if out, err := p.Wait(patience); err == nil {
				t.Errorf("rping is content with a REJ:\n%s", out)
			}
			pcap := filepath.Join(t.TempDir(), "cm.pcap")
			if err := vm.WritePcap(pcap, h.cap.Packets()); err != nil {
				t.Fatal(err)
			}
			gsi := map[string]string{"infiniband.bth.opcode": "100", "infiniband.bth.destqp": "0x000001",
				"infiniband.bth.p_key":  "65535",
				"infiniband.deth.q_key": num(16, uint32(0x80010000)), "infiniband.deth.srcqp": "0x00000001",
				"infiniband.mad.mgmtclass": "0x07", "infiniband.mad.classversion": "0x02", "infiniband.mad.method": "0x03",
				"infiniband.mad.status": "0x0000"}
			with := func(more map[string]string) map[string]string {
				for k, v := range gsi {
					more[k] = v
				}
				return more
			}
			us := fmt.Sprintf("eth.src == %s && infiniband.mad.attributeid == ", mac(0xfe))
			local, remote := num(8, uint32(c.LocalCommID)), num(8, uint32(c.RemoteCommID))
			req := with(map[string]string{
				"infiniband.cm.req":                    local,
				"infiniband.cm.req.serviceid.protocol": "0x06", "infiniband.cm.req.serviceid.dport": num(4, rpingPort),
				"infiniband.cm.req.localcaguid": num(16, uint64(h.dev.Port().GUID)),
				"infiniband.cm.req.localqpn":    num(6, uint32(c.LocalQPN)),
				"infiniband.cm.req.localqkey":   "0x00000000", "infiniband.cm.req.startpsn": num(6, uint32(startPSN)),
				"infiniband.cm.req.responderres": "0x01", "infiniband.cm.req.initdepth": "0x01",
				"infiniband.cm.req.transpsvctype": "0x00",
				"infiniband.cm.req.retrcount":     "0x07", "infiniband.cm.req.rnrretrcount": "0x07",
				"infiniband.cm.req.maxcmretr": "0x07",
				"infiniband.cm.req.pkey":      "0xffff", "infiniband.cm.req.pppmtu": "0x03", "infiniband.cm.req.srq": "0x00",
				"infiniband.cm.req.remoteresptout": "0x11", "infiniband.cm.req.localresptout": "0x11",
				"infiniband.cm.req.prim_localacktout": "0x0e",
				"infiniband.cm.req.prim_locallid":     "65535", "infiniband.cm.req.prim_remotelid": "65535",
				"infiniband.cm.req.prim_hoplim": "0x40",
				"infiniband.cm.req.prim_sl":     "0x00", "infiniband.cm.req.prim_tfcclass": "0x00",
				"infiniband.cm.req.prim_subnetlocal": "0x00",
				"infiniband.cm.req.ip_cm.sport":      num(4, 40000),
			})
			v := "6"
			if fam.host.Is4() {
				v = "4"
				req["infiniband.cm.req.prim_localgid_ipv4"] = fam.host.Addr().String()
				req["infiniband.cm.req.prim_remotegid_ipv4"] = fam.guest.Addr().String()
			} else {
				req["infiniband.cm.req.prim_localgid"] = fam.host.Addr().String()
				req["infiniband.cm.req.prim_remotegid"] = fam.guest.Addr().String()
			}
			req["infiniband.cm.req.ip_cm.ipv"] = "0x0" + v
			req["infiniband.cm.req.ip_cm.sip"+v], req["infiniband.cm.req.ip_cm.dip"+v] = fam.host.Addr().String(),
				fam.guest.Addr().String()
			hasFields(t, pcap, us+num(4, int(mad.AttrREQ)), req)
			hasFields(t, pcap, us+num(4, int(mad.AttrRTU)), with(map[string]string{
				"infiniband.cm.rtu.localcommid": local, "infiniband.cm.rtu.remotecommid": remote}))
			hasFields(t, pcap, us+num(4, int(mad.AttrDREQ)), with(map[string]string{
				"infiniband.cm.dreq.localcommid": local, "infiniband.cm.dreq.remotecommid": remote,
				"infiniband.cm.req.remoteqpneecn": num(6, uint32(c.RemoteQPN))}))
			hasFields(t, pcap, us+num(4, int(mad.AttrREJ)), with(map[string]string{
				"infiniband.cm.rej.remotecommid": num(8, uint32(r.RemoteCommID)), "infiniband.cm.rej.msgrej": "0x00",
				"infiniband.cm.rej.reason": num(4, 28), "infiniband.cm.rej.rejinfolen": "0x00"}))
			readQP(t, pcap, c)
		})
	}
}

// readQP reads what the QP does: PSNs from where the REP said, acknowledgements whose MSN counts up.
func readQP(t *testing.T, pcap string, c cm.ConnInfo) {
	t.Helper()
	psn := c.SendPSN
	msn := 0
	for _, p := range dissect(t, pcap, fmt.Sprintf("eth.src == %s && infiniband.bth.destqp == %s", mac(0xfe),
		num(6, uint32(c.RemoteQPN))),
		"infiniband.bth.opcode", "infiniband.bth.psn", "infiniband.aeth.syndrome", "infiniband.aeth.msn") {
		switch p["infiniband.bth.opcode"] {
		case "4": // SEND only
			expect.Equal(t, p["infiniband.bth.psn"], fmt.Sprint(uint32(psn)), "PSN of a SEND")
			psn = psn.Add(1)
		case "13", "15", "17": // READ response first and last, ACK
			n := 0
			if _, err := fmt.Sscan(p["infiniband.aeth.msn"], &n); err != nil {
				t.Errorf("AETH after MSN %d: MSN %q: %v", msn, p["infiniband.aeth.msn"], err)
			}
			if n < msn {
				t.Errorf("AETH after MSN %d: MSN %d, want no less", msn, n)
			}
			expect.Equal(t, p["infiniband.aeth.syndrome"], "31", "AETH after MSN %d: syndrome", msn)
			msn = n
		}
	}
	expect.Equal(t, msn, 4, "the last MSN, after READ, SEND, WRITE and SEND of rping's server")
}

// TestTsharkReadsIPoIB runs two agents on the segment and compares tshark's
// reading of both the wire and an agent's own capture with their status.
func TestTsharkReadsIPoIB(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("not root: no namespaces")
	}
	if _, err := exec.LookPath("tshark"); err != nil {
		t.Skip(judge.ErrNoTshark)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	must := mustOf(t)
	dir := t.TempDir()
	seg := vm.NewSegment()
	t.Cleanup(seg.Close)
	wire := seg.Capture()
	agents := twoAgents(ctx, t, seg, dir)
	own := filepath.Join(dir, "own.pcapng")
	endCapture := captureTo(ctx, t, agents[0], own)
	dst := netip.MustParseAddr("10.9.0.2")
	reach := func(size int) {
		t.Helper()
		eventually(t, fmt.Sprintf("ping of %d octets", size), func() bool {
			_, err := agents[0].Host.Ping(lab.Ping{Dst: dst, Size: size, Timeout: time.Second})
			return err == nil
		})
	}
	reach(100)
	_, err := agents[0].WaitConns(ctx, patience, func(c []control.Conn) bool { return len(c) == 1 })
	must(err)
	reach(20000)
	conns, err := agents[0].Conns(ctx)
	must(err)
	var st [2]control.Status
	for i := range agents {
		st[i], err = agents[i].Status(ctx)
		must(err)
	}
	must(agents[1].Stop(patience)) // its DREQ too
	time.Sleep(100 * time.Millisecond)
	endCapture()
	packets, err := wire.Stop()
	must(err)
	judgeAll(t, packets)
	onWire := filepath.Join(dir, "wire.pcap")
	must(vm.WritePcap(onWire, packets))
	malformed, err := judge.Malformed(ctx, own)
	must(err)
	for _, m := range malformed {
		t.Error("tshark, of the agent's own capture: " + m)
	}

	passive := 1
	if conns[0].Role == "passive" {
		passive = 0
	}
	for name, file := range map[string]string{"wire": onWire, "agent": own} {
		arps := readARP(t, name, file, st)
		for _, attr := range []mad.AttrID{mad.AttrREQ, mad.AttrREP, mad.AttrRTU, mad.AttrDREQ} {
			if n := len(dissect(t, file, fmt.Sprintf("infiniband.mad.attributeid == %#04x", int(attr)),
				"frame.number")); n == 0 {
				t.Errorf("%s: tshark sees no %v", name, attr)
			}
		}
		reqs := readREQs(t, name, file, st[passive].Interface.UDQPN)
		// Echoes inside: type 0x0800 behind the encapsulation header, on the QP of the connection.
		echoes := dissect(t, file, "icmp.type == 8 && infiniband.bth.opcode != 100", "infiniband.bth.destqp",
			"infiniband.rwh.etype", "ip.src")
		t.Logf("%s: %d ARP, %d REQ, %d echo requests on the connection", name, arps, reqs, len(echoes))
	}
}

func mustOf(t *testing.T) func(error) {
	return func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
}

// twoAgents starts agents on two hosts of seg.
func twoAgents(ctx context.Context, t *testing.T, seg *vm.Segment, dir string) (agents [2]*lab.Agent) {
	t.Helper()
	must, program := mustOf(t), builtProgram(t, dir)
	for i := range agents {
		h, err := lab.NewHost(fmt.Sprintf("%s%d-tshark%d", namePrefix, os.Getpid(), i))
		must(err)
		t.Cleanup(func() { h.Close() })
		must(seg.AddHost(h, "eth0", mac(byte(0xa0+i)), 1500))
		agents[i], err = lab.StartAgent(ctx, h, lab.AgentConfig{
			Program: program, Control: filepath.Join(dir, fmt.Sprint(i, ".sock")),
			Log:  filepath.Join(dir, fmt.Sprint(i, ".log")),
			Args: []string{"--underlay", "eth0", "--name", "ib0", "--address", fmt.Sprintf("10.9.0.%d/24", i+1)},
		})
		must(err)
		t.Cleanup(agents[i].Kill)
	}
	return agents
}

// captureTo has agent's own capture go to file until end is called; it has begun.
func captureTo(ctx context.Context, t *testing.T, agent *lab.Agent, file string) (end func()) {
	t.Helper()
	must := mustOf(t)
	body, err := agent.Stream(ctx, control.PathCapture)
	must(err)
	f, err := os.Create(file)
	must(err)
	first, copied := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(copied)
		b := make([]byte, 1<<16)
		for n := 0; ; n++ {
			k, err := body.Read(b)
			f.Write(b[:k])
			if n == 0 {
				close(first) // it has begun
			}
			if err != nil {
				return
			}
		}
	}()
	<-first
	return func() {
		body.Close()
		<-copied
		must(f.Close())
	}
}

// linkAddr is the 20 octets of a link-layer address, which status prints in parts: flags, QPN, GID.
func linkAddr(t *testing.T, st control.Status) string {
	t.Helper()
	p := strings.Fields(st.Interface.LinkAddr)
	if len(p) != 3 {
		t.Fatalf("link-layer address %q", st.Interface.LinkAddr)
	}
	g := netip.MustParseAddr(p[2]).As16()
	return fmt.Sprintf("%s%s%x", p[0], p[1], g[:])
}

// readARP compares ARP of both agents, as tshark reads it, with their status.
func readARP(t *testing.T, name, file string, st [2]control.Status) int {
	t.Helper()
	links := [2]string{linkAddr(t, st[0]), linkAddr(t, st[1])}
	arps := dissect(t, file, "arp", "arp.hw.type", "arp.hw.size", "arp.proto.type", "arp.opcode", "arp.src.hw",
		"arp.src.proto_ipv4", "arp.dst.proto_ipv4",
		"infiniband.deth.q_key", "infiniband.deth.srcqp", "infiniband.bth.destqp")
	requests, replies := 0, 0
	for _, a := range arps {
		expect.Equal(t, a["arp.hw.type"], "32", "%s: arp.hw.type", name)
		expect.Equal(t, a["arp.hw.size"], "20", "%s: arp.hw.size", name)
		expect.Equal(t, a["arp.proto.type"], "0x0800", "%s: arp.proto.type", name)
		got, from := strings.ReplaceAll(a["arp.src.hw"], ":", ""), 0
		if got == links[1] {
			from = 1
		}
		// A probe for duplicates has no address of its own.
		expect.Equal(t, got, links[from], "%s: hardware address of ARP from agent %d", name, from)
		if ip := a["arp.src.proto_ipv4"]; ip != "0.0.0.0" {
			expect.Equal(t, ip, fmt.Sprintf("10.9.0.%d", from+1), "%s: address of ARP from agent %d", name, from)
		}
		if got := strings.TrimLeft(a["infiniband.deth.srcqp"],
			"0x"); got != strings.TrimLeft(st[from].Interface.UDQPN, "0x") {
			t.Errorf("%s: ARP from QPN %s, want %s", name, a["infiniband.deth.srcqp"], st[from].Interface.UDQPN)
		}
		if got := strings.TrimLeft(a["infiniband.deth.q_key"],
			"0x"); got != strings.TrimLeft(st[from].Interface.QKey, "0x") {
			t.Errorf("%s: ARP with Q_Key %s, want %s", name, a["infiniband.deth.q_key"], st[from].Interface.QKey)
		}
		switch a["arp.opcode"] {
		case "1":
			requests++
		case "2":
			replies++
		}
	}
	if requests == 0 || replies == 0 {
		t.Errorf("%s: %d ARP requests, %d replies", name, requests, replies)
	}
	return len(arps)
}

// readREQs looks for a REQ for the passive side, whose UD QPN is qpn.
func readREQs(t *testing.T, name, file, qpn string) int {
	t.Helper()
	// RFC 4755 section 3.1: the service ID is 0x01, zeros and the UD QPN of the passive side.
	want := "0x0100000000" + strings.TrimPrefix(qpn, "0x")
	reqs := dissect(t, file, "infiniband.mad.attributeid == 0x0010", "infiniband.cm.req.serviceid",
		"infiniband.cm.req.localqpn")
	found := false
	for _, r := range reqs {
		found = found || r["infiniband.cm.req.serviceid"] == want
	}
	if !found {
		t.Errorf("%s: no REQ for service ID %s: %v", name, want, reqs)
	}
	return len(reqs)
}

// builtProgram builds ipoibcmd into a folder.
func builtProgram(t *testing.T, dir string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	program := filepath.Join(dir, "ipoibcmd")
	build := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", program, "ipoibcm/cmd/ipoibcmd")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build ipoibcmd: %v\n%s", err, out)
	}
	return program
}
