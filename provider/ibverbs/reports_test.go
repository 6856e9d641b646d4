package ibverbs

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/verbs"
	wire "ipoibcm/wire/sa"
)

// umadPair returns a file as that of ib_umad, and what the kernel would have in its place.
func umadPair(t *testing.T) (umad, kernel *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	kernel = os.NewFile(uintptr(fds[1]), "kernel")
	t.Cleanup(func() { kernel.Close() })
	return os.NewFile(uintptr(fds[0]), "umad"), kernel
}

// twoSAPorts returns two ports that hear the reports of r, and what the kernel has of them.
func twoSAPorts(t *testing.T, r *reports) (ports [2]*SAPort, out [2]*os.File) {
	t.Helper()
	for i := range ports {
		var umad *os.File
		umad, out[i] = umadPair(t)
		ports[i] = newSAPort(umad, uint32(i), func() []ib.PKey { return []ib.PKey{ib.DefaultPKey} })
		r.add(ports[i])
		if !ports[i].Reports() {
			t.Fatalf("port %d says that it hears no reports", i)
		}
	}
	return ports, out
}

// TestReportAfterPortHasEnded: the file of a port may end before that of the reports, when the device goes.
func TestReportAfterPortHasEnded(t *testing.T) {
	file, kernel := umadPair(t)
	r := newReports("test", file)
	ports, out := twoSAPorts(t, r)
	out[0].Close()
	<-ports[0].done
	report := make([]byte, umadHeaderLen+verbs.MADLen)
	(&umadHeader{lid: 1, qpn: 1, qkey: ib.QKeyGSI, length: uint32(len(report))}).put(report)
	if _, err := kernel.Write(report); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ports[1].SubnetMADs():
	case <-time.After(10 * time.Second):
		t.Error("the other port does not hear the report")
	}
	expect.Equal(t, ports[0].Dropped(), 1, "reports that the port has dropped")
}

// TestReports: the ports of a process share the one receiver of reports. Each hears every
// report, and one of them answers, another one when the first has gone.
func TestReports(t *testing.T) {
	file, kernel := umadPair(t)
	r := newReports("test", file)
	ports, out := twoSAPorts(t, r)
	report := make([]byte, umadHeaderLen+verbs.MADLen)
	h := umadHeader{lid: 1, qpn: 1, qkey: ib.QKeyGSI, length: uint32(len(report))}
	h.put(report)
	m := wire.Message{Header: wire.Header{Method: wire.MethodReport, TransactionID: 7},
		Record: wire.Notice{Generic: true, Trap: wire.TrapGroupCreated}}
	m.AppendBinary(report[:umadHeaderLen]) // the error is always nil
	hear := func(p *SAPort) *SAMAD {
		t.Helper()
		if _, err := kernel.Write(report); err != nil {
			t.Fatal(err)
		}
		select {
		case m := <-p.SubnetMADs():
			return m
		case <-time.After(10 * time.Second):
			t.Fatal("a report was not heard")
			return nil
		}
	}
	answer := func(p *SAPort, m *SAMAD) {
		t.Helper()
		m.Data[methodAt] = byte(wire.MethodReportResp)
		expect.MustEqual(t, p.SendSubnet(m, 0), nil, "error of SendSubnet")
	}
	first := hear(ports[0])
	answer(ports[0], first)
	second := <-ports[1].SubnetMADs()
	answer(ports[1], second)
	expect.Equal(t, first.LID, 1, "LID that the first port heard from")
	tid := func(m *SAMAD) [8]byte { return [8]byte(m.Data[methodAt+5:]) }
	expect.Equal(t, tid(second), tid(first), "transaction ID that the second port heard")
	read := func(f *os.File) bool {
		f.SetReadDeadline(time.Now().Add(10 * time.Second))
		n, err := f.Read(report)
		return err == nil && n == len(report)
	}
	if !read(out[0]) {
		t.Fatal("nobody answers")
	}
	// The other says nothing of the report: the next from it is what it is asked to send now.
	expect.MustEqual(t, ports[1].SendSubnet(&SAMAD{LID: 9, QPN: 1}, 0), nil, "error of SendSubnet")
	if !read(out[1]) {
		t.Fatal("the second port sends nothing")
	}
	var got umadHeader
	expect.MustEqual(t, got.UnmarshalBinary(report), nil, "error of what the second port sent")
	if got.lid != 9 {
		t.Errorf("the second port sent to LID %d, want only what goes to LID 9: both answered", got.lid)
	}

	expect.MustEqual(t, ports[0].Close(), nil, "error of Close")
	h.put(report)
	m.AppendBinary(report[:umadHeaderLen])
	if answer(ports[1], hear(ports[1])); !read(out[1]) {
		t.Error("nobody answers when the first port has gone")
	}
	if err := ports[1].Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-r.done:
	case <-time.After(10 * time.Second):
		t.Error("the receiver outlives its last port")
	}
}
