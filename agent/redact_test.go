package agent

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"ipoibcm/cm"
	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/ipoib"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// Identifiers that protect connections, none of which a peer, and none who may only look, may be told.
const (
	secretQPN    ib.QPN     = 0x8129ab
	secretUDQPN  ib.QPN     = 0x13d7c5
	secretQKey   ib.QKey    = 0x7ac01b22
	secretComm   mad.CommID = 0x5eadc0de
	secretRemote mad.CommID = 0x31415926
)

// The machine's own notes go through the same: what they tell of a neighbour keeps
// its IP address and GID, and loses its QPN.
func TestNoteForPeers(t *testing.T) {
	link := encap.LinkAddr{Flags: encap.FlagRC, QPN: secretUDQPN, GID: ib.GIDFromAddr(netip.MustParseAddr("fe80::2"))}
	a := &Agent{log: slog.New(slog.DiscardHandler)}
	a.peers = a.newPeers()
	ip := netip.MustParseAddr("10.0.0.2")
	a.note(ipoib.Note{Kind: ipoib.NoteNeigh, Addr: ip, Peer: link, Text: fmt.Sprintf("%v is at %v", ip, link)})
	_, lines := a.peers.EventsAfter(0, 1)
	if !strings.Contains(string(lines), "10.0.0.2 is at 80 redacted fe80::2") {
		t.Errorf("got %s", lines)
	}
	if strings.Contains(string(lines), "13d7c5") {
		t.Errorf("the UD QPN is in %s", lines)
	}
}

// Members of the socket's group see no identifier of a connection, in any document: with these a
// local user could end it.
func TestLookersGetNoIdentifiers(t *testing.T) {
	secret := map[string]string{"QPN": "8129ab", "Q_Key": "7ac01b22", "communication ID": "5eadc0de",
		"the peer's": "31415926"}
	note := cm.Note{Dir: cm.Sent, Message: "REQ", LocalCommID: secretComm, RemoteCommID: secretRemote, QPN: secretQPN,
		Text: "as it was"}
	text := strings.ToLower(fmt.Sprint(note, " at ", secretQPN, ", key ", secretQKey))
	for name, s := range secret {
		if !strings.Contains(text, s) {
			t.Fatalf("the text does not have the %s: the test shows nothing", name)
		}
	}
	event := control.Event{Text: text, Fields: map[string]string{"comm": secretComm.String(),
		"remote": secretRemote.String(), "qpn": "8129ab"}}
	conns := control.Conns{Conns: []control.Conn{{Why: text, Crossing: text, Peer: "80 13d7c5 fe80::2",
		LocalQPN: "8129ab", RemoteQPN: "8129ab",
		LocalCommID: secretComm.String(), RemoteCommID: secretRemote.String()}}}
	explained := control.Explanation{Why: []string{text}, LastREJ: text}
	status := control.Status{Warnings: []string{text}, Peers: []control.Peer{{LinkAddr: "80 13d7c5 fe80::2"}}}
	for what, v := range map[string]any{"event": forLookers(event), "conns": forLookers(conns),
		"explanation": forLookers(explained), "status": forLookers(status)} {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		for name, s := range secret {
			if strings.Contains(strings.ToLower(string(b)), s) {
				t.Errorf("%s has the %s: %s", what, name, b)
			}
		}
	}
	if got := forLookers(conns).Conns[0].Peer; got != "80 13d7c5 fe80::2" {
		t.Errorf("the peer's link-layer address became %q", got)
	}
	if conns.Conns[0].LocalQPN != "8129ab" {
		t.Error("the agent's own was changed on the way")
	}
}
