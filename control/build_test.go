package control

import "testing"

func TestBuildInWords(t *testing.T) {
	const commit = "3eeca6315b2d90fd8a394cf220633905748dc810"
	for _, tt := range []struct {
		name string
		b    Build
		want string
	}{
		{"a release", Build{Release: "v1.2", Commit: commit, Go: "go1.26"}, "v1.2, commit 3eeca6315b2d, go1.26"},
		{"a checkout without tags", Build{Commit: commit, Modified: true}, "commit 3eeca6315b2d with changes"},
		{"Go's own version has the commit", Build{Release: "v0.0.0-2026-3eeca6315b2d+dirty", Commit: commit,
			Modified: true}, "v0.0.0-2026-3eeca6315b2d+dirty"},
		{"an archive", Build{Go: "go1.26"}, "of unknown source, go1.26"},
	} {
		if got := tt.b.String(); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}
