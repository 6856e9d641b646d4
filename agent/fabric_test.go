package agent

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/ipoib"
	"ipoibcm/sa"
	"ipoibcm/verbs"
	wire "ipoibcm/wire/sa"
)

// A subnetProvider is a stub whose port is an InfiniBand one.
type subnetProvider struct {
	stubProvider
	now verbs.Port
	sub verbs.SubnetPort
}

func (p *subnetProvider) Port() verbs.Port             { return p.now }
func (p *subnetProvider) SubnetPort() verbs.SubnetPort { return p.sub }

// A subnetPort records what is sent to the administrator.
type subnetPort struct {
	verbs.SubnetPort
	sent    []verbs.SubnetMAD
	reports bool
}

func (p *subnetPort) Reports() bool { return p.reports }
func (p *subnetPort) SendSubnet(m *verbs.SubnetMAD, _ time.Duration) error {
	p.sent = append(p.sent, *m)
	return nil
}

// asked takes what was sent, as methods and attributes.
func (p *subnetPort) asked(t *testing.T) (all []wire.Message) {
	t.Helper()
	for _, m := range p.sent {
		var q wire.Message
		if err := q.UnmarshalBinary(m.Data[:]); err != nil {
			t.Fatal(err)
		}
		all = append(all, q)
	}
	p.sent = nil
	return all
}

// newPortAgent returns an agent on an InfiniBand port that nobody has answered yet.
func newPortAgent(t *testing.T, set func(*subnetProvider)) (*Agent, *subnetProvider, *subnetPort) {
	t.Helper()
	a, _ := newAgent(t)
	out := &subnetPort{reports: true}
	p := &subnetProvider{sub: out, now: verbs.Port{Active: true, GIDs: []ib.GID{gidA}, MTU: ib.MTU2048, InfiniBand: true,
		LID: 5, SMLID: 1, SMSL: 2, SubnetTimeout: 14, GRHRequired: true, PKeys: []ib.PKey{0xffff, 0x8001}}}
	if set != nil {
		set(p)
	}
	a.opt.Provider = p
	if err := a.openFabric(p.now); err != nil {
		t.Fatal(err)
	}
	mo := a.machineOptions(p.now)
	mo.Fabric.SA.Spread = -1
	a.m = ipoib.New(mo)
	a.step(ipoib.Start{})
	return a, p, out
}

// What a provider of an InfiniBand port must have, and what the machine is told of the port.
func TestOpenFabric(t *testing.T) {
	a, _ := newAgent(t)
	if err := a.openFabric(verbs.Port{}); err != nil || a.fabric.port != nil {
		t.Errorf("an Ethernet port: %v, fabric %+v; want neither", err, a.fabric)
	}
	port := verbs.Port{InfiniBand: true}
	if err := a.openFabric(port); err == nil {
		t.Error("a provider without subnet administration was taken for an InfiniBand port")
	}
	a.opt.Provider = &subnetProvider{}
	if err := a.openFabric(port); err == nil {
		t.Error("a provider whose subnet administration is missing was taken")
	}
	for _, reports := range []bool{true, false} {
		a, p, _ := newPortAgent(t, func(p *subnetProvider) { p.sub = &subnetPort{reports: reports} })
		got := a.machineFabric(p.now)
		want := sa.Port{Active: true, LID: 5, SMLID: 1, SMSL: 2, GID: gidA, SubnetTimeout: 14, GRHRequired: true}
		if got.Port != want {
			t.Errorf("the machine is told %+v, want %+v", got.Port, want)
		}
		if got.NoReports == reports {
			t.Errorf("reports %v: NoReports is %v", reports, got.NoReports)
		}
	}
}

// The question goes to the subnet manager, by its LID and SL and with a GRH where the port needs
// one; it is repeated, and the answer of somebody else is none.
func TestSubnetQuestions(t *testing.T) { synctest.Test(t, testSubnetQuestions) }

func testSubnetQuestions(t *testing.T) {
	a, _, out := newPortAgent(t, nil)
	if len(out.sent) != 1 {
		t.Fatalf("%d MADs at the start, want the question for the administrator", len(out.sent))
	}
	first := out.sent[0]
	expect.Equal(t, first.LID, 1, "LID of the question")
	expect.Equal(t, first.SL, 2, "SL of the question")
	expect.Equal(t, first.QPN, ib.QPNGSI, "QPN of the question")
	if first.GID.IsZero() {
		t.Error("the question has no GID, want the administrator's")
	}
	out.sent = nil
	end := time.Now().Add(5 * time.Second)
	for ; len(out.sent) == 0 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		a.step(ipoib.Wake{})
	}
	if len(out.sent) == 0 || out.sent[0].Data != first.Data {
		t.Fatal("it is not repeated")
	}
	answer := func(lid ib.LID) {
		var q wire.Message
		if err := q.UnmarshalBinary(first.Data[:]); err != nil {
			t.Fatal(err)
		}
		q.Method = wire.MethodGetResp
		q.Record = wire.ClassPortInfo{BaseVersion: 1, ClassVersion: 2}
		m := &verbs.SubnetMAD{LID: lid, QPN: ib.QPNGSI}
		q.AppendBinary(m.Data[:0]) // the error is always nil
		out.sent = nil
		a.subnetMAD(m)
	}
	answer(9)
	if s := a.m.Fabric().Admin.State; s != sa.StateAsking {
		t.Errorf("another port's answer: state %v, want %v", s, sa.StateAsking)
	}
	answer(1)
	if s := a.m.Fabric().Admin.State; s != sa.StateReady {
		t.Errorf("after the answer: state %v, want %v", s, sa.StateReady)
	}
	asked := out.asked(t)
	expect.MustEqual(t, len(asked), 1, "number of questions after the answer")
	expect.Equal(t, asked[0].Method, wire.MethodSet, "after the answer: Method")
	expect.Equal(t, asked[0].Record.Attr(), wire.MCMemberRecord{}.Attr(), "after the answer: attribute")
}

// What an event of the port asks for anew: SM change, reregister and an active port have groups
// joined again; what says nothing of the administrator does not. (LIDs are the client's to see.)
func TestPortEvents(t *testing.T) {
	for _, tt := range []struct {
		ev    verbs.EventKind
		lid   ib.LID
		again bool
	}{
		{verbs.Reregister, 5, true}, {verbs.SMChange, 5, true}, {verbs.PKeyChange, 5, true},
		{verbs.LIDChange, 5, false}, {verbs.LIDChange, 6, true},
	} {
		a, p, out := newPortAgent(t, nil)
		out.sent = nil
		p.now.LID = tt.lid
		a.verbsEvent(verbs.Event{Kind: tt.ev})
		if got := len(out.sent) > 0; got != tt.again {
			t.Errorf("%v, LID %d: asked anew %v, want %v", tt.ev, tt.lid, got, tt.again)
		}
	}
}

// The kernel's interface that came has groups not left, and one that went has them joined again.
func TestSharedPort(t *testing.T) {
	a, _, out := newPortAgent(t, nil)
	shared := false
	a.opt.Shared = func() bool { return shared }
	out.sent = nil
	shared = true
	a.fabricTick()
	if !a.m.Fabric().SharesPort {
		t.Error("the machine does not know of the kernel's interface")
	}
	if len(out.sent) > 0 {
		t.Error("groups are joined again although nobody has left")
	}
	shared = false
	a.fabricTick()
	if a.m.Fabric().SharesPort {
		t.Error("the machine thinks that the kernel's interface is still there")
	}
	if len(out.sent) == 0 {
		t.Error("nothing is asked again, and the kernel may have left our groups")
	}
}

// Why there is no link, in the words of status.
func TestWhyNoLink(t *testing.T) {
	refuse := func(s wire.Status) func(t *testing.T, a *Agent, out *subnetPort) {
		return func(t *testing.T, a *Agent, out *subnetPort) {
			for range 2 { // who is there, and the broadcast group
				q := out.asked(t)[0]
				q.Method = wire.MethodGetResp
				if q.Record.Attr() == (wire.MCMemberRecord{}).Attr() {
					q.Status = s
				}
				m := &verbs.SubnetMAD{LID: 1, QPN: ib.QPNGSI}
				q.AppendBinary(m.Data[:0]) // the error is always nil
				a.subnetMAD(m)
			}
		}
	}
	for _, tt := range []struct {
		name string
		port func(*subnetProvider)
		then func(t *testing.T, a *Agent, out *subnetPort)
		want string
	}{
		{"no manager was here", func(p *subnetProvider) { p.now.SMLID = 0 }, nil, "no subnet manager"},
		{"nobody answers", nil, nil, "does not answer"},
		{"the group does not exist", nil, refuse(wire.StatusInsufficientComponents), "create_broadcast"},
		{"it refuses", nil, refuse(wire.StatusDenied), "refuses"},
		{"no P_Key", func(p *subnetProvider) { p.now.PKeys = []ib.PKey{0x8002} }, nil, "P_Key 0xffff"},
	} {
		a, _, out := newPortAgent(t, tt.port)
		if tt.then != nil {
			tt.then(t, a, out)
		}
		s := a.viewSubnet()
		if !strings.Contains(s.Why, tt.want) {
			t.Errorf("%s: %q does not speak of %q", tt.name, s.Why, tt.want)
		}
		var status control.Status
		status.Warnings = a.warnings(a.m.Status(), a.providerCounters(), a.port().Active, nil)
		if !strings.Contains(strings.Join(status.Warnings, "\n"), tt.want) {
			t.Errorf("%s: warnings %q do not speak of %q", tt.name, status.Warnings, tt.want)
		}
	}
}

// Where datagrams to a GID go is what the administrator said of it, and nothing before it did.
func TestHandlesFollowPaths(t *testing.T) {
	a, _, _ := newPortAgent(t, nil)
	if _, err := a.attr(gidA); err == nil {
		t.Error("there is an address handle for a GID without a path")
	}
	path := verbs.Path{DGID: gidA, DLID: 7, SL: 3, GRH: true, HopLimit: 64, MTU: ib.MTU2048}
	a.usePath(path)
	got, err := a.attr(gidA)
	if err != nil {
		t.Fatal(err)
	}
	want := verbs.AHAttr{SGID: a.link.GID, DGID: gidA, LID: 7, SL: 3, GRH: true, HopLimit: 64}
	if got != want {
		t.Errorf("address handle: got %+v, want %+v", got, want)
	}
	a.do(ipoib.ForgetPath{DGID: gidA})
	if _, err := a.attr(gidA); err == nil {
		t.Error("there is an address handle for a GID whose path was forgotten")
	}
}
