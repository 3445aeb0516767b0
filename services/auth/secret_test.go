package auth_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"regexp"
	"strings"
	"testing"

	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
)

var tokenForm = regexp.MustCompile(`^carrel_[A-Za-z0-9_-]{43}$`)

func TestTokensAreRandomPrefixedAndStoredAsTheirHash(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		s := auth.NewToken()
		if !tokenForm.MatchString(s.Text) {
			t.Fatalf("token %q", s.Text)
		}
		sum := sha256.Sum256([]byte(s.Text))
		if !bytes.Equal(s.Hash, sum[:]) || !bytes.Equal(auth.Hash(s.Text), s.Hash) {
			t.Fatal("the hash is not SHA-256 of the text")
		}
		if seen[s.Text] {
			t.Fatal("a token came twice")
		}
		seen[s.Text] = true
	}
	if code := auth.NewCode().Text; len(code) != 43 || strings.HasPrefix(code, auth.TokenPrefix) {
		t.Errorf("code %q", code)
	}
}

func TestSignInLinkKeepsItsSecretInTheFragment(t *testing.T) {
	for _, c := range []struct{ base, ca, want string }{
		{"http://127.0.0.1:7070", "", "http://127.0.0.1:7070/#sign-in=CODE"},
		{"https://carrel.example/", "FP", "https://carrel.example/#sign-in=CODE.FP"},
	} {
		if got := auth.SignInLink(c.base, "CODE", c.ca); got != c.want {
			t.Errorf("got %s, want %s", got, c.want)
		}
	}
}

func TestJoinTokenRoundTrip(t *testing.T) {
	want := auth.JoinToken{Gateway: "https://gw.example:7070", Secret: auth.NewCode().Text, CA: "fp"}
	text := want.Encode()
	if strings.ContainsAny(text, " \n'\"$&;/+=") {
		t.Errorf("%q is not one word for every shell", text)
	}
	for _, form := range []string{text, " " + text + "\n"} {
		if got, err := auth.ParseJoinToken(form); err != nil || got != want {
			t.Errorf("%q: %+v, %v", form, got, err)
		}
	}
}

func joinText(t *testing.T, v any) string {
	t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return "carrel-join." + base64.RawURLEncoding.EncodeToString(raw)
}

func TestBrokenJoinTokensSayWhatToDo(t *testing.T) {
	whole := auth.JoinToken{Gateway: "https://gw", Secret: "s"}.Encode()
	for what, text := range map[string]string{
		"empty": "", "another kind": auth.NewToken().Text, "cut": whole[:len(whole)-3], "prefix only": "carrel-join.", "not base64": "carrel-join.%%%",
		"no secret": joinText(t, map[string]string{"gateway": "https://gw"}), "no gateway": joinText(t, map[string]string{"secret": "s"}),
		"gateway without scheme": joinText(t, map[string]string{"secret": "s", "gateway": "gw:7070"}), "wrong types": joinText(t, map[string]int{"secret": 1}),
		"a file for a gateway": joinText(t, map[string]string{"secret": "s", "gateway": "file://x/etc/passwd"}),
	} {
		if got, err := auth.ParseJoinToken(text); !fleet.IsKind(err, fleet.KindInvalid) || !strings.Contains(err.Error(), "carrel host token") {
			t.Errorf("%s: %+v, %v", what, got, err)
		}
	}
}

func FuzzParseJoinToken(f *testing.F) {
	f.Add(auth.JoinToken{Gateway: "https://gw", Secret: "s", CA: "c"}.Encode())
	f.Add("carrel-join.e30")
	f.Add("carrel-join.")
	f.Fuzz(func(t *testing.T, text string) {
		token, err := auth.ParseJoinToken(text)
		if err != nil {
			if !fleet.IsKind(err, fleet.KindInvalid) || token != (auth.JoinToken{}) {
				t.Fatalf("%v, %+v", err, token)
			}
			return
		}
		if again, err := auth.ParseJoinToken(token.Encode()); err != nil || again != token {
			t.Fatalf("%+v came back as %+v, %v", token, again, err)
		}
	})
}
