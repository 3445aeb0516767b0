package auth

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"net/url"
	"strings"

	"github.com/carrel-dev/carrel/services/fleet"
)

// TokenPrefix begins every bearer token, so that secret scanners can find one.
const TokenPrefix = "carrel_"

// secretBytes is the entropy of each secret: 256 bits.
const secretBytes = 32

// Secret is a random value that is shown once and stored only as its hash.
type Secret struct {
	// Text is what the holder keeps.
	Text string
	// Hash is what the store keeps: SHA-256 of Text. The text has 256 random bits, so that a slow hash would add nothing.
	Hash []byte
}

// NewToken makes a bearer token: the prefix and 43 characters of base64url.
func NewToken() Secret { return newSecret(TokenPrefix) }

// NewCode makes a one-time code for a sign-in, a join or a ticket.
func NewCode() Secret { return newSecret("") }

func newSecret(prefix string) Secret {
	raw := make([]byte, secretBytes)
	_, _ = rand.Read(raw) // never fails: crypto/rand ends the process instead (Go 1.24)
	text := prefix + base64.RawURLEncoding.EncodeToString(raw)
	return Secret{Text: text, Hash: Hash(text)}
}

// Hash returns the stored form of a secret's text.
func Hash(text string) []byte {
	sum := sha256.Sum256([]byte(text))
	return sum[:]
}

// SignInLink is the address that `carrel login` takes. Code and CA fingerprint stand in the fragment, which no client sends to a server.
func SignInLink(base, code, caFingerprint string) string {
	fragment := "sign-in=" + code
	if caFingerprint != "" {
		fragment += "." + caFingerprint
	}
	return strings.TrimSuffix(base, "/") + "/#" + fragment
}

// joinPrefix begins every join token.
const joinPrefix = "carrel-join."

// JoinToken is what a host needs in order to join.
type JoinToken struct {
	// Gateway is the gateway's base URL.
	Gateway string `json:"gateway"`
	// Secret is good for one join.
	Secret string `json:"secret"`
	// CA is the fingerprint of the gateway's own CA; empty when its certificate is publicly trusted or it speaks plain HTTP on loopback.
	CA string `json:"ca,omitempty"`
}

// Encode returns the token as one word.
func (t JoinToken) Encode() string {
	raw, err := json.Marshal(t)
	if err != nil {
		panic(err) // three strings always marshal
	}
	return joinPrefix + base64.RawURLEncoding.EncodeToString(raw)
}

// ParseJoinToken reads a token back. KindInvalid.
func ParseJoinToken(text string) (JoinToken, error) {
	var t JoinToken
	rest, ok := strings.CutPrefix(strings.TrimSpace(text), joinPrefix)
	if !ok {
		return t, fleet.Errorf(fleet.KindInvalid, "this is not a join token; `carrel host token` prints one that begins with %s", joinPrefix)
	}
	raw, err := base64.RawURLEncoding.DecodeString(rest)
	if err != nil || json.Unmarshal(raw, &t) != nil || t.Secret == "" {
		return JoinToken{}, fleet.Errorf(fleet.KindInvalid, "the join token is not whole; copy all of it, or print another with `carrel host token`")
	}
	if u, err := url.Parse(t.Gateway); err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return JoinToken{}, fleet.Errorf(fleet.KindInvalid, "the join token names no gateway; print another with `carrel host token`")
	}
	return t, nil
}
