package agent

import (
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"time"

	"ipoibcm/control"
	"ipoibcm/ib"
)

// redacted stands where an identifier was.
const redacted = "redacted"

// identifiers matches what may be a communication ID, QPN, PSN, Q_Key, P_Key,
// service ID or GUID, and the P_Key in an MGID (RFC 4391 section 4), in any text of
// ours: numbers with 0x, six or more hexadecimal digits in a row, and what follows
// comm=, remote=, qpn=, psn= and service=. A number that is no identifier may match
// too; a part of an IP address does not.
var identifiers = regexp.MustCompile(`0[xX][0-9a-fA-F]+|[0-9a-fA-F]{6,}|` +
	`\b(?:comm|remote|qpn|psn|service)=[^\s,;)]+|\b[fF][fF][0-9a-fA-F]{2}:[46]01[bB]:[0-9a-fA-F]*`)

// Redact takes what may be an identifier out of a text: communication IDs, QPNs, PSNs,
// Q_Keys, P_Keys, service IDs and GUIDs.
func Redact(s string) string { return identifiers.ReplaceAllLiteralString(s, redacted) }

// redactAll returns a copy of v, a document of package control, without identifiers in any of its texts,
// however deep. It walks v by reflection, so it covers fields that are yet to come.
func redactAll[T any](v T) T { return redactTexts(v, Redact) }

// redactTexts returns a copy of v with redact applied to each of its texts.
func redactTexts[T any](v T, redact func(string) string) T {
	return redactValue(reflect.ValueOf(&v).Elem(), redact).Interface().(T)
}

func redactValue(v reflect.Value, redact func(string) string) reflect.Value {
	if v.IsZero() {
		return v
	}
	out := reflect.New(v.Type()).Elem()
	switch v.Kind() {
	case reflect.String:
		out.SetString(redact(v.String()))
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			return v
		}
		for i := range v.NumField() {
			out.Field(i).Set(redactValue(v.Field(i), redact))
		}
	case reflect.Slice:
		out.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
		for i := range v.Len() {
			out.Index(i).Set(redactValue(v.Index(i), redact))
		}
	case reflect.Map:
		out.Set(reflect.MakeMapWithSize(v.Type(), v.Len()))
		for it := v.MapRange(); it.Next(); {
			out.SetMapIndex(redactValue(it.Key(), redact), redactValue(it.Value(), redact))
		}
	case reflect.Pointer:
		out.Set(reflect.New(v.Type().Elem()))
		out.Elem().Set(redactValue(v.Elem(), redact))
	default:
		return v
	}
	return out
}

// wholeStatus returns what a trusted peer sees of our status: all but the identifiers that protect
// connections, and the protections.
func wholeStatus(s control.Status) control.Status {
	out := redactAll(s)
	out.Interface.Build = s.Interface.Build // it has the number of a commit, which looks like an identifier
	out.Protections = nil                   // they say what an attacker would have to overcome
	out.Limited = "identifiers of queue pairs and connections are shown on that host only"
	return out
}

// briefStatus returns what any other peer that may ask sees: that the agent lives, and the settings that
// both ends must have alike. It names nobody.
func briefStatus(s control.Status) control.Status {
	i, u := s.Interface, s.Underlay
	return control.Status{
		Version: s.Version,
		Interface: control.Interface{State: i.State, Mode: i.Mode, UDMTU: i.UDMTU, UDAccept: i.UDAccept,
			ReceiveMTU: i.ReceiveMTU, Build: i.Build,
			CMPaths: []string{}, Addresses: []control.Address{}},
		Underlay: control.Underlay{PathMTU: u.PathMTU, Active: u.Active, GIDs: []string{}},
		Peers:    []control.Peer{},
		Limited:  "the rest is for the GIDs in peer_trust of that host's configuration",
	}
}

// forPeers returns the event as a trusted peer sees it.
func forPeers(e control.Event) control.Event { return redactAll(e) }

// secrets matches what protects connections in any text of ours: numbers with 0x, and what
// follows the names of communication IDs, QPNs and PSNs. The QPN in a link-layer address is
// that of UD, which every host on the link hears, and stays.
var secrets = regexp.MustCompile(`0[xX][0-9a-fA-F]+|\b(?:comm|remote|qpn|psn)=[^\s,;)]+`)

// forLookers returns a document as members of the socket's group see it. A local user can send packets that
// seem to be this host's (docs/security.md). With the identifiers such a user could end a connection, or
// have a packet taken on a UC connection.
func forLookers[T any](v T) T {
	out := redactTexts(v, func(s string) string { return secrets.ReplaceAllLiteralString(s, redacted) })
	switch out := any(&out).(type) {
	case *control.Conns:
		for i := range out.Conns {
			c := &out.Conns[i]
			c.LocalQPN, c.RemoteQPN, c.LocalCommID, c.RemoteCommID = redacted, redacted, redacted, redacted
		}
	case *control.Event:
		for k := range out.Fields {
			if secrets.MatchString(k + "=1") {
				out.Fields[k] = redacted
			}
		}
	}
	return out
}

// An asker says what another host's agent may ask of ours.
type asker uint8

const (
	askerRefused asker = iota // nothing
	askerAllowed              // NULL, ECHO, and a STATUS that says little
	askerTrusted              // everything there is, without identifiers
)

// asker returns what the agent at g may ask.
func (s *peerService) asker(g ib.GID) asker {
	in := func(list []netip.Prefix) bool {
		return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(g.Addr().Unmap()) })
	}
	switch now := s.a.live.lists(); {
	case in(now.trust):
		return askerTrusted
	case in(now.allow):
		return askerAllowed
	}
	return askerRefused
}
