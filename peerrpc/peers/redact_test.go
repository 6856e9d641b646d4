package peers

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"ipoibcm/cm"
	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/peerrpc"
	"ipoibcm/rpcrdma"
	"ipoibcm/serviceid"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// Identifiers that protect connections, none of which a peer may be told.
const (
	secretQPN    ib.QPN     = 0x8129ab
	secretUDQPN  ib.QPN     = 0x13d7c5
	secretPSN    ib.PSN     = 0x3fa2b1
	secretQKey   ib.QKey    = 0x7ac01b22
	secretPKey   ib.PKey    = 0xb3f1
	secretComm   mad.CommID = 0x5eadc0de
	secretRemote mad.CommID = 0x31415926
)

// forms returns every way in which the secrets could be written.
func forms() map[string][]byte {
	out := map[string][]byte{}
	add := func(name string, v uint32, octets int) {
		for _, f := range []string{"%x", "%X", "%06x", "%08x", "%d"} {
			s := fmt.Sprintf(f, v)
			out[name+" "+s] = []byte(s)
		}
		out[name+" as octets"] = binary.BigEndian.AppendUint32(nil, v)[4-octets:]
	}
	add("QPN", uint32(secretQPN), 3)
	add("UD QPN", uint32(secretUDQPN), 3)
	add("PSN", uint32(secretPSN), 3)
	add("Q_Key", uint32(secretQKey), 4)
	add("communication ID", uint32(secretComm), 4)
	add("the peer's communication ID", uint32(secretRemote), 4)
	for _, s := range []string{secretPKey.String(), strings.TrimPrefix(secretPKey.String(), "0x")} {
		out["P_Key "+s] = []byte(s)
	}
	return out
}

// secretText has them all, as our own types write them and bare.
func secretText() string {
	link := encap.LinkAddr{Flags: encap.FlagRC, QPN: secretUDQPN, GID: ib.GIDFromAddr(netip.MustParseAddr("fe80::2"))}
	note := cm.Note{Dir: cm.Sent, Message: "REQ", LocalCommID: secretComm, RemoteCommID: secretRemote, QPN: secretQPN,
		ServiceID: serviceid.New(serviceid.RFC, secretUDQPN), Reason: cm.ReasonStale, Text: "as it was"}
	bare := fmt.Sprintf("%d %d %x %X", secretQPN, secretComm, secretRemote, uint32(secretQPN))
	return fmt.Sprint(note, " to ", link, " at ", secretQPN, " from ", secretPSN, ", key ", secretQKey, ", ", secretPKey,
		", ff12:401b:b3f1::1, ", bare, " at 10.0.0.2 and fe80::4cd9:c6ff:fe53:dc2")
}

// fillSecret puts it into every text of v, and one of everything into every list.
func fillSecret(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(secretText())
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type() != reflect.TypeFor[time.Time]() {
				fillSecret(v.Field(i))
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fillSecret(v.Index(0))
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fillSecret(key)
		fillSecret(value)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fillSecret(v.Elem())
	}
}

// secretive is a service that has nothing to tell but secrets.
func secretive() *Service {
	var status control.Status
	fillSecret(reflect.ValueOf(&status).Elem())
	status.Interface.Mode, status.Interface.State, status.Interface.Build = "rc", "up", "v1.2.3"
	s := &Service{opt: Options{Status: func(context.Context) (control.Status, error) { return status, nil }}}
	var e control.Event
	fillSecret(reflect.ValueOf(&e).Elem())
	s.events.add(e)
	return s
}

// reply has the service answer a call and returns the octets that go to the peer.
func (s *Service) reply(t *testing.T, who asker, proc uint32, args []byte) (rpcrdma.RPCReply, []byte, []byte) {
	t.Helper()
	call := append((&rpcrdma.RPCCall{Prog: peerrpc.Program, Vers: peerrpc.Version, Proc: proc}).Append(nil), args...)
	a, ok := s.answer(t.Context(), who, &rpcrdma.Serve{Payload: call}).(rpcrdma.Answer)
	if !ok {
		t.Fatalf("procedure %d: no answer", proc)
	}
	head, results, err := rpcrdma.ParseRPCReply(a.Payload)
	if err != nil {
		t.Fatal(err)
	}
	return head, results, a.Payload
}

var procedures = map[string]struct {
	proc uint32
	args []byte
}{
	"NULL":   {peerrpc.ProcNull, nil},
	"STATUS": {peerrpc.ProcStatus, nil},
	"EVENTS": {peerrpc.ProcEvents, peerrpc.Range{Max: 100}.Append(nil)},
	"ECHO":   {peerrpc.ProcEcho, peerrpc.AppendEcho(nil, []byte("hello"))},
}

// Whatever a peer asks and whoever it is: no identifier that protects connections
// is in the answer, in whatever field and form it may come to be.
func TestPeersGetNoIdentifiers(t *testing.T) {
	if want := int(peerrpc.ProcLast) + 1; len(procedures) != want {
		t.Fatalf("%d procedures are asked, there are %d", len(procedures), want)
	}
	for _, secret := range []string{secretQPN.String(), "13d7c5", secretPSN.String(), secretQKey.String(),
		secretComm.String(),
		secretRemote.String(), "b3f1"} {
		if !strings.Contains(secretText(), secret) {
			t.Fatalf("the text does not have %s: the test shows nothing", secret)
		}
	}
	s := secretive()
	for name, p := range procedures {
		for _, who := range []asker{askerAllowed, askerTrusted} {
			_, _, sent := s.reply(t, who, p.proc, p.args)
			for form, octets := range forms() {
				if bytes.Contains(sent, octets) {
					t.Errorf("%s for asker %d has the %s", name, who, form)
				}
			}
		}
	}
}

// Numbers are not redacted, so none of what peers are sent may be an identifier.
func TestNumbersForPeersAreNoIdentifiers(t *testing.T) {
	suspect := regexp.MustCompile(`(?i)qpn|psn|comm|key|handle|guid|lid|secret|id$`)
	var walk func(path string, typ reflect.Type)
	walk = func(path string, typ reflect.Type) {
		switch typ.Kind() {
		case reflect.Slice, reflect.Pointer, reflect.Map:
			walk(path, typ.Elem())
		case reflect.Struct:
			if typ != reflect.TypeFor[time.Time]() {
				for _, f := range reflect.VisibleFields(typ) {
					walk(path+"."+f.Name, f.Type)
				}
			}
		case reflect.String, reflect.Bool:
		default:
			if strings.HasSuffix(path, ".PID") {
				return
			}
			if strings.HasPrefix(path, "Status.Underlay.Subnet.") { // LIDs are addresses, which every packet shows
				return
			}
			if suspect.MatchString(path) {
				t.Errorf("%s is a %v and would be sent as it is", path, typ)
			}
		}
	}
	walk("Status", reflect.TypeFor[control.Status]())
	walk("Event", reflect.TypeFor[control.Event]())
}

// The agent's own event is not changed on the way.
func TestForPeersCopies(t *testing.T) {
	var in control.Event
	fillSecret(reflect.ValueOf(&in).Elem())
	before := fmt.Sprint(in)
	forPeers(in)
	if after := fmt.Sprint(in); after != before {
		t.Errorf("the event itself became %s", after)
	}
}

// A peer that may only ask whether we live learns no name, address, GID or peer of
// ours; one that is trusted learns those.
func TestPeerStatusByAsker(t *testing.T) {
	own := control.Status{Version: control.Version,
		Interface: control.Interface{Name: "ibcm0", State: "up", Mode: "rc", UDMTU: 2044, ReceiveMTU: 65524,
			GID: "fe80::1", PID: 77, Build: "v1.0.0-0.20260101000000-123456789abc",
			Addresses: []control.Address{{Prefix: "10.0.0.1/24", State: "ok"}}},
		Underlay: control.Underlay{Device: "eth0", PathMTU: 4096, Active: true, GIDs: []string{"fe80::1"}},
		Peers:    []control.Peer{{GID: "fe80::2", Addresses: []string{"10.0.0.2"}}},
		Warnings: []string{"10.0.0.3 is used twice"}}
	s := New(Options{Status: func(context.Context) (control.Status, error) { return own, nil }})
	get := func(who asker) (st control.Status, text string) {
		t.Helper()
		head, results, _ := s.reply(t, who, peerrpc.ProcStatus, nil)
		if head.Status != rpcrdma.RPCSuccess {
			t.Fatalf("STATUS: %v", head.Status)
		}
		doc, _, err := peerrpc.ParseDocument(results, nil)
		if err == nil {
			err = json.Unmarshal(doc, &st)
		}
		if err != nil {
			t.Fatal(err)
		}
		return st, string(doc)
	}
	brief, text := get(askerAllowed)
	for _, secret := range []string{"ibcm0", "eth0", "fe80::1", "fe80::2", "10.0.0", "77"} {
		if strings.Contains(text, secret) {
			t.Errorf("who is not trusted learns %q: %s", secret, text)
		}
	}
	if got, want := brief.Interface.State+" "+brief.Interface.Mode, "up rc"; got != want {
		t.Errorf("who is not trusted sees %q, want %q", got, want)
	}
	if got := brief.Interface.UDMTU; got != 2044 {
		t.Errorf("who is not trusted sees UD MTU %d, want 2044", got)
	}
	if brief.Limited == "" {
		t.Error("who is not trusted is not told that this is not all")
	}
	whole, text := get(askerTrusted)
	for _, known := range []string{"ibcm0", "eth0", "fe80::1", "fe80::2", "10.0.0.2", "10.0.0.3", own.Interface.Build} {
		if !strings.Contains(text, known) {
			t.Errorf("who is trusted does not learn %q: %s", known, text)
		}
	}
	if whole.Limited == "" {
		t.Error("who is trusted is not told what is left out")
	}
}

// Events are for those who are trusted, everything else for all that may ask. Who may not ask any more, and has
// a connection still, gets nothing.
func TestProceduresByAsker(t *testing.T) {
	for name, p := range procedures {
		for who, want := range map[asker]rpcrdma.RPCStatus{
			askerRefused: rpcrdma.RPCAuthError, askerAllowed: rpcrdma.RPCSuccess, askerTrusted: rpcrdma.RPCSuccess} {
			s := secretive()
			if name == "EVENTS" && who == askerAllowed {
				want = rpcrdma.RPCAuthError
			}
			head, results, _ := s.reply(t, who, p.proc, p.args)
			if who == askerRefused && len(results) > 0 {
				t.Errorf("%s for asker %d: %d octets of results, want none", name, who, len(results))
			}
			if head.Status != want {
				t.Errorf("%s for asker %d: %v, want %v", name, who, head.Status, want)
			}
			refused := map[bool]uint64{true: 1}[want == rpcrdma.RPCAuthError]
			if got := s.n.distrusted.Load(); got != refused {
				t.Errorf("%s for asker %d: %d counted as not trusted, want %d", name, who, got, refused)
			}
			if want == rpcrdma.RPCAuthError && head.AuthStat != peerrpc.AuthTooWeak {
				t.Errorf("%s for asker %d: auth_stat %d, want %d", name, who, head.AuthStat, peerrpc.AuthTooWeak)
			}
		}
	}
}

// An echo is what was sent, and bounded.
func TestPeerEcho(t *testing.T) {
	s := secretive()
	payload := bytes.Repeat([]byte("abc"), 1000)
	_, results, _ := s.reply(t, askerAllowed, peerrpc.ProcEcho, peerrpc.AppendEcho(nil, payload))
	if got, err := peerrpc.ParseEcho(results, nil); err != nil || !bytes.Equal(got, payload) {
		t.Errorf("%d octets came back (%v), want the %d that were sent", len(got), err, len(payload))
	}
	head, _, _ := s.reply(t, askerAllowed, peerrpc.ProcEcho, peerrpc.AppendDocument(nil, make([]byte, peerrpc.MaxEcho+1)))
	if head.Status != rpcrdma.RPCGarbageArgs {
		t.Errorf("an echo above the bound: %v, want %v", head.Status, rpcrdma.RPCGarbageArgs)
	}
}

// Who may ask what goes by the GID; trust needs no leave besides.
func TestAsker(t *testing.T) {
	prefixes := func(list ...string) (out []netip.Prefix) {
		for _, p := range list {
			out = append(out, netip.MustParsePrefix(p))
		}
		return out
	}
	s := New(Options{Allow: prefixes("fe80::/10"), Trust: prefixes("fe80::2/128", "192.0.2.7/32")})
	for _, tt := range []struct {
		gid  string
		want asker
	}{
		{"fe80::1", askerAllowed},
		{"fe80::2", askerTrusted},
		{"192.0.2.7", askerTrusted},
		{"192.0.2.8", askerRefused},
		{"2001:db8::2", askerRefused},
	} {
		if got := s.asker(ib.GIDFromAddr(netip.MustParseAddr(tt.gid))); got != tt.want {
			t.Errorf("%s: %d, want %d", tt.gid, got, tt.want)
		}
	}
}
