//! The idempotency key, and the contract under which a server honours it.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use uuid::Uuid;

use crate::invalid::InvalidInput;

/// The name by which an operation is recognised when it is sent again.
///
/// A request extension: set one with `with_extension`, or let the layer make one under a
/// [`KeyContract`]. Either way it is stored in the request's extensions before the first send, is
/// on every attempt, and can be read there by lower layers and after the call by outer ones.
///
/// `Debug` and `Display` shorten it, so that it can be logged; [`as_str`](Self::as_str) is the whole.
///
/// ```
/// use reqwest_idempotent_retry::IdempotencyKey;
///
/// # fn main() -> Result<(), reqwest_idempotent_retry::InvalidInput> {
/// let key = IdempotencyKey::new("order-17-2026")?;
/// assert_eq!(key.as_str(), "order-17-2026");
/// assert_eq!(key.to_string(), "orde…(13)");
/// assert!(IdempotencyKey::new("two words").is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct IdempotencyKey(HeaderValue);

/// The longest key that is accepted, in bytes: what the services that publish a limit agree on.
const LONGEST: usize = 255;

/// Characters of a key that its `Debug` and `Display` show at most.
const SHOWN: usize = 4;

const FIELD: &str = "idempotency key";

impl IdempotencyKey {
    /// A key of your own: the same for every repeat of one intent, another for the next intent.
    ///
    /// # Errors
    ///
    /// When `key` is empty, longer than 255 bytes, or holds anything but visible ASCII characters.
    pub fn new(key: impl AsRef<str>) -> Result<Self, InvalidInput> {
        let key = key.as_ref();
        let invalid = |problem| Err(InvalidInput::new(FIELD, problem));
        if key.is_empty() {
            return invalid("is empty");
        }
        if key.len() > LONGEST {
            return invalid("is longer than 255 bytes");
        }
        if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return invalid("holds a character that is not visible ASCII");
        }
        HeaderValue::from_str(key)
            .map(Self)
            .or_else(|_| invalid("is not a header value"))
    }

    /// A random key (UUIDv4 from the operating system's generator).
    ///
    /// The layer makes one by itself under a [`KeyContract`]. Make it yourself, and keep it, where
    /// you may drop the future and still want to ask what became of the operation.
    #[must_use]
    pub fn generate() -> Self {
        let mut text = [0; uuid::fmt::Hyphenated::LENGTH];
        Uuid::new_v4().hyphenated().encode_lower(&mut text);
        #[expect(
            clippy::expect_used,
            reason = "hexadecimal digits and hyphens are visible ASCII"
        )]
        let value = HeaderValue::from_maybe_shared(Bytes::from_owner(text))
            .expect("a UUID is a valid header value");
        Self(value)
    }

    /// The whole key, as it was given and without the quotes that a contract may add on the wire.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }
}

impl fmt::Display for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.as_str();
        let shown = SHOWN.min(key.len() / 2);
        write!(f, "{}…({})", &key[..shown], key.len())
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdempotencyKey({self})")
    }
}

/// The caller's word that the API recognises repeats by a key, and how.
///
/// A client-wide setting of the builder. Without it no key is made: a key that the server does not
/// look at proves nothing. The default is a bare value in `Idempotency-Key`, on POST and PATCH,
/// honoured for ever.
///
/// ```
/// use std::time::Duration;
/// use http::{HeaderName, Method};
/// use reqwest_idempotent_retry::KeyContract;
///
/// let stripe = KeyContract::default().lifetime(Duration::from_secs(24 * 3600));
/// let draft = KeyContract::default().quoted(true);    // draft-ietf-httpapi-idempotency-key-header
/// let own = KeyContract::default()
///     .header(HeaderName::from_static("x-request-id"))
///     .methods([Method::POST, Method::DELETE]);
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct KeyContract {
    header: HeaderName,
    quoted: bool,
    lifetime: Option<Duration>,
    methods: Vec<Method>,
}

impl Default for KeyContract {
    fn default() -> Self {
        Self {
            header: HeaderName::from_static("idempotency-key"),
            quoted: false,
            lifetime: None,
            methods: vec![Method::POST, Method::PATCH],
        }
    }
}

impl KeyContract {
    /// The header that carries the key. Default `Idempotency-Key`.
    pub fn header(mut self, name: HeaderName) -> Self {
        self.header = name;
        self
    }

    /// Whether the value is an RFC 8941 string, with quotes. Default: bare, as deployed services
    /// want it.
    pub fn quoted(mut self, quoted: bool) -> Self {
        self.quoted = quoted;
        self
    }

    /// How long after the first send the server still knows the key. No repeat is started that
    /// could end after it. `Duration::MAX`, the default, is for ever.
    pub fn lifetime(mut self, lifetime: Duration) -> Self {
        self.lifetime = (lifetime != Duration::MAX).then_some(lifetime);
        self
    }

    /// The methods that a key is made for. Default POST and PATCH.
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.methods = methods.into_iter().collect();
        self
    }

    pub(crate) fn covers(&self, method: &Method) -> bool {
        self.methods.contains(method)
    }

    pub(crate) fn expires_after(&self) -> Option<Duration> {
        self.lifetime
    }

    /// The key in the caller's own header, if there is one. It is adopted, never overwritten.
    pub(crate) fn adopt(
        &self,
        headers: &HeaderMap,
    ) -> Result<Option<IdempotencyKey>, InvalidInput> {
        let mut lines = headers.get_all(&self.header).iter();
        let Some(line) = lines.next() else {
            return Ok(None);
        };
        if lines.next().is_some() {
            return Err(InvalidInput::new(FIELD, "is in two header lines"));
        }
        let text = line
            .to_str()
            .map_err(|_| InvalidInput::new(FIELD, "holds a character that is not visible ASCII"))?;
        let text = match self.quoted {
            true => unquote(text),
            false => None,
        }
        .map_or_else(|| IdempotencyKey::new(text), IdempotencyKey::new)?;
        Ok(Some(text))
    }

    /// Puts the key into the header, unless the caller's own line is there.
    pub(crate) fn stamp(&self, key: &IdempotencyKey, headers: &mut HeaderMap) {
        if !headers.contains_key(&self.header) {
            headers.insert(self.header.clone(), self.on_the_wire(key));
        }
    }

    fn on_the_wire(&self, key: &IdempotencyKey) -> HeaderValue {
        if !self.quoted {
            return key.0.clone();
        }
        let escaped = key.as_str().replace('\\', r"\\").replace('"', "\\\"");
        HeaderValue::try_from(format!("\"{escaped}\"")).unwrap_or_else(|_| key.0.clone())
    }
}

/// The text of an RFC 8941 string; `None` where `value` is not one.
fn unquote(value: &str) -> Option<String> {
    let inner = value.strip_prefix('"')?.strip_suffix('"')?;
    let mut text = String::with_capacity(inner.len());
    let mut characters = inner.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => text.push(characters.next().filter(|c| matches!(c, '\\' | '"'))?),
            '"' => return None,
            other => text.push(other),
        }
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_visible_ascii_of_1_to_255_bytes() {
        assert!(IdempotencyKey::new("!~").is_ok());
        assert!(IdempotencyKey::new("k".repeat(255)).is_ok());
        for bad in ["", "a b", "a\n", "ключ", "\u{7f}", &"k".repeat(256)] {
            let error = IdempotencyKey::new(bad).expect_err("must be refused");
            assert_eq!(error.field(), "idempotency key");
        }
    }

    #[test]
    fn debug_and_display_never_show_more_than_half_of_a_key() {
        for (key, shown) in [
            ("a", "…(1)"),
            ("abc", "a…(3)"),
            ("secret-order", "secr…(12)"),
        ] {
            let key = IdempotencyKey::new(key).expect("valid");
            assert_eq!(key.to_string(), shown);
            assert_eq!(format!("{key:?}"), format!("IdempotencyKey({shown})"));
        }
    }

    #[test]
    fn generated_keys_are_version_4_uuids_and_differ() {
        let key = IdempotencyKey::generate();
        let uuid = Uuid::parse_str(key.as_str()).expect("a UUID");
        assert_eq!(uuid.get_version_num(), 4);
        assert_ne!(key, IdempotencyKey::generate());
    }

    #[test]
    fn quoted_contracts_read_back_what_they_write() {
        let contract = KeyContract::default().quoted(true);
        for key in ["plain", r#"a"b"#, r"back\slash", r#"\"#] {
            let key = IdempotencyKey::new(key).expect("valid");
            let mut headers = HeaderMap::new();
            contract.stamp(&key, &mut headers);
            let line = headers["idempotency-key"].to_str().expect("ASCII");
            assert!(line.starts_with('"') && line.ends_with('"'), "{line}");
            assert_eq!(contract.adopt(&headers), Ok(Some(key)));
        }
    }

    #[test]
    fn a_line_that_is_no_quoted_string_is_taken_as_it_is() {
        let contract = KeyContract::default().quoted(true);
        for line in ["bare", r#""open"#, r#""a"b""#, r#""bad\escape""#] {
            let headers = HeaderMap::from_iter([(
                HeaderName::from_static("idempotency-key"),
                HeaderValue::from_str(line).expect("a header value"),
            )]);
            let key = contract.adopt(&headers).expect("valid").expect("present");
            assert_eq!(key.as_str(), line);
        }
    }
}
