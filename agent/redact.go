package agent

import (
	"regexp"

	"ipoibcm/control"
	"ipoibcm/redact"
)

// secrets matches what protects connections in any text of ours: numbers with 0x, and what
// follows the names of communication IDs, QPNs and PSNs. The QPN in a link-layer address is
// that of UD, which every host on the link hears, and stays.
var secrets = regexp.MustCompile(`0[xX][0-9a-fA-F]+|\b(?:comm|remote|qpn|psn)=[^\s,;)]+`)

// forLookers returns a document as members of the socket's group see it. A local user can send packets that
// seem to be this host's (docs/security.md). With the identifiers such a user could end a connection, or
// have a packet taken on a UC connection.
func forLookers[T any](v T) T {
	out := redact.Texts(v, func(s string) string { return secrets.ReplaceAllLiteralString(s, redact.Mark) })
	switch out := any(&out).(type) {
	case *control.Conns:
		for i := range out.Conns {
			c := &out.Conns[i]
			c.LocalQPN, c.RemoteQPN, c.LocalCommID, c.RemoteCommID = redact.Mark, redact.Mark, redact.Mark, redact.Mark
		}
	case *control.Event:
		for k := range out.Fields {
			if secrets.MatchString(k + "=1") {
				out.Fields[k] = redact.Mark
			}
		}
	}
	return out
}
