package fleet_test

import (
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/carrel-dev/carrel/services/fleet"
)

func TestNames(t *testing.T) {
	long := strings.Repeat("a", 300)
	check := map[string]func(string) error{
		"name":   func(s string) error { return fleet.CheckName("workspace", s) },
		"volume": fleet.CheckVolumeName,
		"login":  fleet.CheckLogin,
		"image":  fleet.CheckImageName,
	}
	for what, c := range map[string]struct{ good, bad []string }{
		"name": {
			good: []string{"a", "demo", "a1", "a-b-c", "x9-9", strings.Repeat("a", 22)},
			bad:  []string{"", "A", "Demo", "a.b", "a/b", "../x", "a_b", "-a", "a-", "1a", "a--b", "--", ".a", "a ", " a", "a\n", "a\nb", "é", "a\x00", "ａ", strings.Repeat("a", 23), long, "xn--a"},
		},
		"volume": {
			good: []string{"data", strings.Repeat("a", 22) + "-home", strings.Repeat("v", 40)},
			bad:  []string{"", "a.b", "a/b", "..", "a--b", "-a", ".a", "A", "a\n", strings.Repeat("a", 41), long},
		},
		"login": {
			good: []string{"ana", "_svc", "a.b", "a_b-c", "a1", strings.Repeat("a", 32)},
			bad:  []string{"", "root", "Ana", "1a", "-a", ".a", "a b", "a:b", "a/b", "a\n", "a$", strings.Repeat("a", 33), long},
		},
		"image": {
			good: []string{"base", "torch2.6-cuda12.6", "1", "a_b", strings.Repeat("a", 64)},
			bad:  []string{"", "A", ".a", "a.", "-a", "a/b", "a:b", "a@b", "a b", "a\n", strings.Repeat("a", 65), long},
		},
	} {
		for _, name := range c.good {
			if err := check[what](name); err != nil {
				t.Errorf("%s %q: %v", what, name, err)
			}
		}
		for _, name := range c.bad {
			err := check[what](name)
			if !fleet.IsKind(err, fleet.KindInvalid) {
				t.Errorf("%s %.30q is taken: %v", what, name, err)
				continue
			}
			if text := fleet.UserMessage(err); len(text) > 300 || strings.ContainsAny(text, "\n\x00") || !utf8.ValidString(text) {
				t.Errorf("%s %.30q: the message is not one short clean line: %q", what, name, text)
			}
		}
	}
}

// A name that is taken fits DESIGN D11's label `<app>--<workspace>--<user>` and can be taken apart again; whatever comes in, the answer
// is a decision or a clean line.
func TestNamesFitALabelAndMessagesAreClean(t *testing.T) {
	label := regexp.MustCompile(`^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$`)
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.OneOf(rapid.String(), rapid.StringMatching(`[a-z0-9-]{0,25}`)).Draw(t, "name")
		if err := fleet.CheckName("user", name); err != nil {
			text := fleet.UserMessage(err)
			if !utf8.ValidString(text) || strings.ContainsAny(text, "\n\r\x00\x1b") {
				t.Fatalf("message %q", text)
			}
			return
		}
		whole := strings.Repeat("a", 15) + "--" + name + "--" + name
		if !label.MatchString(whole) || len(strings.Split(whole, "--")) != 3 {
			t.Fatalf("%q does not fit a label", whole)
		}
		if err := fleet.CheckVolumeName(name + "-home"); err != nil {
			t.Fatalf("its home: %v", err)
		}
	})
}
