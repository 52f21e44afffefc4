//! Something like a browser: it says what time it gives, and waits.

use std::time::{Duration, Instant};

use crate::shop::Shop;
use crate::{BROWSER_TIMEOUT, REFUSED, Result, plain_http};

pub(crate) struct Browser {
    http: reqwest::Client,
    shop: String,
}

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) refused: Option<String>,
    pub(crate) text: String,
    pub(crate) took: Duration,
}

impl Browser {
    pub(crate) fn new(shop: &Shop) -> Result<Self> {
        Ok(Self {
            http: plain_http().build()?,
            shop: shop.url(),
        })
    }

    /// Dropped, it closes its connection: the browser is gone.
    pub(crate) async fn opens(&self, product: &str, gives: Duration) -> Result<Answer> {
        let begun = Instant::now();
        let url = format!("{}/page/{product}", self.shop);
        let request = self.http.get(url);
        let request = request.header(BROWSER_TIMEOUT, gives.as_millis().to_string());
        let answer = request.send().await?;
        let refused = answer.headers().get(REFUSED);
        let refused = refused.and_then(|reason| Some(reason.to_str().ok()?.to_owned()));
        Ok(Answer {
            status: answer.status().as_u16(),
            refused,
            text: answer.text().await?,
            took: begun.elapsed(),
        })
    }

    /// What an operator's Prometheus would fetch.
    pub(crate) async fn metrics(&self) -> Result<String> {
        let answer = self.http.get(self.metrics_url()).send().await?;
        Ok(answer.error_for_status()?.text().await?)
    }

    pub(crate) fn metrics_url(&self) -> String {
        format!("{}/metrics", self.shop)
    }
}
