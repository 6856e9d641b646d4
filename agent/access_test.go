package agent

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"ipoibcm/control"
	"ipoibcm/peercred"
	"ipoibcm/redact"
)

// Root and our own user may change things; others, and those whom the kernel does not
// name, may not.
func TestWhoMayChange(t *testing.T) {
	for _, tt := range []struct {
		name string
		ctx  context.Context
		want int
	}{
		{"nobody is known", t.Context(), http.StatusForbidden},
		{"root", peercred.As(t.Context(), 0), http.StatusOK},
		{"our own user", peercred.As(t.Context(), os.Geteuid()), http.StatusOK},
		{"another", peercred.As(t.Context(), 65534), http.StatusForbidden},
	} {
		w := httptest.NewRecorder()
		allowed := owners(func(http.ResponseWriter, *http.Request) error { return nil })
		allowed.ServeHTTP(w, httptest.NewRequest("POST", "/v1/reload", nil).WithContext(tt.ctx))
		if w.Code != tt.want {
			t.Errorf("%s: status %d, want %d", tt.name, w.Code, tt.want)
		}
	}
}

// Root and our own user see a document whole; who may only look does not see what protects connections.
func TestShow(t *testing.T) {
	for uid, want := range map[int]string{0: "0x8129ab", os.Geteuid(): "0x8129ab", 65534: redact.Mark} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest("GET", control.PathConns, nil).WithContext(peercred.As(t.Context(), uid))
		show(w, r, control.Conns{Conns: []control.Conn{{LocalQPN: "0x8129ab"}}})
		var got control.Conns
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
			t.Fatal(err)
		}
		if got.Conns[0].LocalQPN != want {
			t.Errorf("user %d sees %q, want %q", uid, got.Conns[0].LocalQPN, want)
		}
	}
}

func TestUserOfAClient(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	out, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if !peercred.MayChange(withUser(t.Context(), in)) {
		t.Error("our own user may change nothing")
	}
	if peercred.MayChange(withUser(t.Context(), struct{ net.Conn }{in})) {
		t.Error("a connection that the kernel does not know may change things")
	}
}

// A group that exists gets the socket, another leaves it as it is.
func TestShare(t *testing.T) {
	for _, tt := range []struct {
		group string
		want  os.FileMode
	}{{"", 0o600}, {"no-such-group-9", 0o600}, {"daemon", 0o660}} {
		if tt.want == 0o660 && os.Geteuid() != 0 {
			continue // not ours to give
		}
		path := filepath.Join(t.TempDir(), "a.sock")
		l, err := listen(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := share(path, tt.group); err != nil {
			t.Errorf("group %q: %v", tt.group, err)
		}
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != tt.want {
			t.Errorf("group %q: mode %v, %v; want %v", tt.group, st.Mode().Perm(), err, tt.want)
		}
		l.Close()
	}
}
