package agent

import (
	"strings"
	"testing"

	"ipoibcm/ipoib"
	"ipoibcm/verbs"
)

// A madless provider has QP 1 or has not, and nothing else.
type madless struct {
	verbs.Provider
	port verbs.MADPort
}

func (m madless) MADPort() verbs.MADPort { return m.port }

type madPort struct{ verbs.MADPort }

// What a provider without QP 1 means for each policy: gsi refuses to start, auto
// says that messages travel in-band, inband does not care.
func TestProviderWithoutQP1(t *testing.T) {
	for _, tt := range []struct {
		port verbs.MADPort
		cm   ipoib.CMTransport
		err  string
		note string
	}{
		{nil, ipoib.CMGSI, "cm_transport auto", ""},
		{nil, ipoib.CMAuto, "", "in-band"},
		{nil, ipoib.CMInband, "", ""},
		{madPort{}, ipoib.CMGSI, "", ""},
		{madPort{}, ipoib.CMAuto, "", ""},
	} {
		a := &Agent{opt: Options{Provider: madless{port: tt.port}, CM: tt.cm}}
		err := a.checkCM()
		if (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%v, QP 1 %v: %v", tt.cm, tt.port != nil, err)
		}
		if notes := strings.Join(a.opt.Notes, ""); (notes != "") != (tt.note != "") || !strings.Contains(notes, tt.note) {
			t.Errorf("%v, QP 1 %v: notes %q", tt.cm, tt.port != nil, notes)
		}
	}
}
