package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Each command has a page, which names it and its flags.
func TestMan(t *testing.T) {
	dir := t.TempDir()
	root := newRoot()
	root.SetArgs([]string{"man", dir})
	if err := root.Execute(); err != nil {
		t.Fatal(err)
	}
	var each func(c *cobra.Command)
	each = func(c *cobra.Command) {
		if !c.IsAvailableCommand() && c.HasParent() || c.Name() == "help" {
			return
		}
		name := strings.ReplaceAll(c.CommandPath(), " ", "-")
		b, err := os.ReadFile(filepath.Join(dir, name+".8"))
		if err != nil {
			t.Error(err)
			return
		}
		page := strings.ReplaceAll(string(b), `\-`, "-")
		if !strings.Contains(page, `.TH "`+strings.ToUpper(name)+`" "8"`) {
			t.Errorf("%s.8 has no heading:\n%.200s", name, page)
		}
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden && !strings.Contains(page, "--"+f.Name) {
				t.Errorf("%s.8 does not have --%s", name, f.Name)
			}
		})
		for _, sub := range c.Commands() {
			each(sub)
		}
	}
	each(root)
}

// A directory that is not there is said to be missing.
func TestManNowhere(t *testing.T) {
	root := newRoot()
	root.SetArgs([]string{"man", filepath.Join(t.TempDir(), "no")})
	if err := root.Execute(); err == nil || !strings.Contains(err.Error(), "is no directory") {
		t.Errorf("got %v", err)
	}
}
